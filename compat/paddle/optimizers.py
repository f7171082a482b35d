"""Legacy optimizer over fused buffers, with sharded state."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring_of, ring_of_size
from commlib.core.context import CommContext
from commlib.core.rings.opening import new_ring
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


class DistributedFusedLamb(ops.DistributedFusedLamb):
    """The LAMB optimizer with the constructor of ``paddle.incubate.DistributedFusedLamb``.

    Source: Paddle 2.6, where it is for static programs only. It creates rings 1 and 2 if they
    do not exist. Ring 1 has the ranks of this node, and ring 2 has the ranks of the same position
    in all nodes.
    """

    def __init__(
        self,
        learning_rate: float | Tensor = 0.001,
        lamb_weight_decay: float | None = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameters: Iterable[Any] | None = None,
        grad_clip: Any = None,
        exclude_from_weight_decay_fn: Callable[[Tensor], bool] | None = None,
        clip_after_allreduce: bool = True,
        is_grad_scaled_by_nranks: bool = True,
        alignment: int | None = 128,
        use_master_param_norm: bool = True,
        gradient_accumulation_steps: int = 1,
        use_master_acc_grad: bool = True,
        nproc_per_node: int | None = None,
        use_hierarchical_allreduce: bool = False,
        name: str | None = None,
    ) -> None:
        """Make the optimizer over ring 0; every rank calls it.

        Args:
            learning_rate: Learning rate of all parameters.
            lamb_weight_decay: Weight decay; None for 0.
            beta1: Decay of the mean of the gradients.
            beta2: Decay of the mean square of the gradients.
            epsilon: Summand of the denominator.
            parameters: The parameters. Upstream finds those of a static program.
            grad_clip: None, or a ``ClipGradByGlobalNorm``, whose ``clip_norm`` is the limit.
            exclude_from_weight_decay_fn: Returns True for a parameter without weight decay.
            clip_after_allreduce: True limits the norm of the sum, False that of each rank.
            is_grad_scaled_by_nranks: True if the loss was divided by the number of ranks.
            alignment: Ignored: parameters begin at multiples of 128 bytes or more.
            use_master_param_norm: True takes norms of master weights.
            gradient_accumulation_steps: Microbatches per update.
            use_master_acc_grad: True adds microbatches in float32.
            nproc_per_node: Ranks that divide one copy of the state; None for all.
            use_hierarchical_allreduce: True sums inside the nodes, then across them.
            name: Ignored.

        Raises:
            ArgumentError: ``parameters`` is missing, ``grad_clip`` is another one, or
                ``nproc_per_node`` does not divide the ranks.
            CommError: As ``ops.DistributedFusedLamb``.
        """
        ring = ring_of(_CLASS, 0)
        prefix = ring._describe(_CLASS)
        if parameters is None:
            raise ArgumentError(
                f"{prefix}: parameters is None; expected the parameters, because there is no "
                f"static program; pass parameters=model.parameters()"
            )
        shard, cross = _rings_of_nodes(ring, nproc_per_node, use_hierarchical_allreduce)
        super().__init__(
            parameters,
            ring,
            lr=learning_rate,
            betas=(beta1, beta2),
            eps=epsilon,
            weight_decay=0.0 if lamb_weight_decay is None else lamb_weight_decay,
            exclude_from_weight_decay=exclude_from_weight_decay_fn,
            max_grad_norm=_limit(prefix, grad_clip),
            clip_after_allreduce=clip_after_allreduce,
            is_grad_scaled_by_nranks=is_grad_scaled_by_nranks,
            gradient_accumulation_steps=gradient_accumulation_steps,
            use_master_acc_grad=use_master_acc_grad,
            use_master_param_norm=use_master_param_norm,
            shard_ring=shard,
            cross_ring=cross,
        )

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Set the gradients to zero, or drop them.

        Args:
            set_to_zero: False drops the gradients.
        """
        self.zero_grad(set_to_none=not set_to_zero)


_CLASS = "DistributedFusedLamb"


def _limit(where: str, grad_clip: Any) -> float:
    """Return the limit of the global norm; 0 for none."""
    if grad_clip is None:
        return 0.0
    if type(grad_clip).__name__ != "ClipGradByGlobalNorm" or not hasattr(grad_clip, "clip_norm"):
        raise ArgumentError(
            f"{where}: grad_clip is {type(grad_clip).__name__}; expected a ClipGradByGlobalNorm "
            f"with clip_norm, or None; call commlib.ops.DistributedFusedLamb with max_grad_norm="
        )
    limit: float = grad_clip.clip_norm
    return limit


def _rings_of_nodes(
    ring: CommContext, each: int | None, crosses: bool
) -> tuple[CommContext | None, CommContext | None]:
    """Return the ring inside this node and, if it is used, the one across nodes."""
    if each is None:
        return None, None
    if isinstance(each, bool) or not isinstance(each, int) or each < 1 or ring.size % each:
        raise ArgumentError(
            f"{ring._describe(_CLASS)}: nproc_per_node={each!r}; expected a divisor of "
            f"{ring.size}; pass the ranks of one node, or None"
        )
    if each == ring.size:
        return None, None
    first = ring.rank - ring.rank % each
    inside = new_ring(1, ring.ranks[first : first + each])
    return inside, new_ring(2, ring.ranks[ring.rank % each :: each]) if crosses else None
