"""Legacy optimizer over fused buffers, with sharded state."""

from collections.abc import Callable, Iterable, Sequence

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring_of, ring_of_size
from commlib.errors import ArgumentError

Tensor = torch.Tensor


def distributed_fused_lamb(
    parameters: Iterable[Tensor],
    learning_rate: float | Tensor = 0.001,
    lamb_weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    max_global_grad_norm: float = -1.0,
    exclude_from_weight_decay_fn: Callable[[Tensor], bool] | None = None,
    clip_after_allreduce: bool = True,
    is_grad_scaled_by_nranks: bool = True,
    alignment: int = 128,
    use_master_param_norm: bool = True,
    acc_steps: int = 1,
    use_master_acc_grad: bool = True,
    nranks: int | None = None,
    ring_ids: Sequence[int] = (0,),
    use_hierarchical_allreduce: bool = False,
) -> ops.DistributedFusedLamb:
    """Return the LAMB optimizer whose ``step`` is the legacy operator.

    Source: operators ``distributed_fused_lamb_init`` and ``distributed_fused_lamb``. Upstream
    passes every buffer to the operator; here the optimizer owns them. It runs on the current
    stream.

    Args:
        parameters: The parameters.
        learning_rate: Learning rate of all parameters.
        lamb_weight_decay: Weight decay.
        beta1: Decay of the mean of the gradients.
        beta2: Decay of the mean square of the gradients.
        epsilon: Summand of the denominator.
        max_global_grad_norm: Limit of the global norm; none if it is 0 or below, as upstream.
        exclude_from_weight_decay_fn: Returns True for a parameter without weight decay.
        clip_after_allreduce: True limits the norm of the sum, False that of each rank.
        is_grad_scaled_by_nranks: True if the loss was divided by the number of ranks.
        alignment: Ignored: parameters begin at multiples of 128 bytes or more.
        use_master_param_norm: True takes norms of master weights.
        acc_steps: Microbatches per update.
        use_master_acc_grad: True adds microbatches in float32.
        nranks: Size of the first ring; None is not checked.
        ring_ids: All ranks; then, if the state is divided over fewer, the ranks inside a node;
            then, for a sum in two stages, the ranks of the same position across nodes.
        use_hierarchical_allreduce: True sums in two stages, over the second and the third ring.

    Returns:
        The optimizer.

    Raises:
        ArgumentError: ``ring_ids`` or ``nranks`` does not fit.
        CommError: As ``ops.DistributedFusedLamb``.
    """
    name = "distributed_fused_lamb"
    if not ring_ids or len(ring_ids) < 3 * use_hierarchical_allreduce:
        raise ArgumentError(
            f"{name}: ring_ids={list(ring_ids)} with "
            f"use_hierarchical_allreduce={use_hierarchical_allreduce}; expected the rings of all "
            f"ranks, inside a node and across nodes; pass ring_ids=[0, 1, 2]"
        )
    ring = ring_of(name, ring_ids[0])
    if nranks is not None:
        ring_of_size(name, ring_ids[0], nranks)
    return ops.DistributedFusedLamb(
        parameters,
        ring,
        lr=learning_rate,
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=lamb_weight_decay,
        exclude_from_weight_decay=exclude_from_weight_decay_fn,
        max_grad_norm=max(max_global_grad_norm, 0.0),
        clip_after_allreduce=clip_after_allreduce,
        is_grad_scaled_by_nranks=is_grad_scaled_by_nranks,
        gradient_accumulation_steps=acc_steps,
        use_master_acc_grad=use_master_acc_grad,
        use_master_param_norm=use_master_param_norm,
        shard_ring=ring_of(name, ring_ids[1]) if len(ring_ids) > 1 else None,
        cross_ring=ring_of(name, ring_ids[2]) if use_hierarchical_allreduce else None,
    )
