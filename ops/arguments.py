"""A ring as an argument: the ring, its id or its name."""

from typing import Any, TypeAlias, cast

import torch

from commlib.core.context import CommContext
from commlib.core.manager import _rings, comm
from commlib.engines.reduction_names import NAMES, LowerName, is_torch_reduction, reduction_name
from commlib.engines.reductions import unknown
from commlib.errors import ArgumentError, RingError
from commlib.ops.registered.library import registered

Ring: TypeAlias = int | str | CommContext

_WITH_OUT = frozenset(
    {
        "all_gather",
        "all_reduce",
        "all_to_all",
        "broadcast",
        "gather",
        "partial_all_gather",
        "reduce",
        "reduce_scatter",
        "scatter",
    }
)

_BEFORE_RING = {  # the arguments of the others before the ring, if not only x
    "DistributedFusedLamb": "params, ",
    "all_reduce_residual_norm": "x, residual, weight, ",
    "barrier": "",
    "class_center_sample": "label, num_classes, num_samples, ",
    "data_norm": "x, batch_size, batch_sum, batch_square_sum, ",
    "expert_dispatch": "x, expert_ids, num_experts, capacity, ",
    "fused_attention": "x, qkv_weight, linear_weight, ",
    "fused_feedforward": "x, linear1_weight, linear2_weight, ",
    "fused_multi_transformer": "x, layers, cache, ",
    "global_gather": "x, local_count, global_count, ",
    "global_scatter": "x, local_count, global_count, ",
    "margin_cross_entropy": "logits, label, ",
    "partial_recv": "out, ",
    "recv": "out, ",
    "softmax_with_cross_entropy": "logits, label, ",
}


_AFTER_RING = {  # the arguments after the ring that have no default
    "fused_multi_transformer": "config=config",
    "partial_recv": "peer=peer",
    "partial_send": "peer=peer",
    "recv": "peer=peer",
    "send": "peer=peer",
}


def ring_number(collective: str, ring: Any, role: str = "ring_id") -> int:
    """Return the id of ``ring``: a ring, its id or its name. ``comm`` refuses an invalid id.

    Args:
        collective: What the program has called.
        ring: What it has passed.
        role: The argument.

    Raises:
        ArgumentError: ``ring`` is a tensor: the call has the order of torch.distributed.
        RingError: The ring is closed, a bool or a reduction.
    """
    if type(ring) is int:
        return ring
    if isinstance(ring, bool):
        raise RingError(
            f"{collective}: {role}={ring}; expected a ring, its id or its name; a bool is none"
        )
    if isinstance(ring, CommContext):
        if _rings.get(ring.ring_id) is not ring:
            raise RingError(
                f"{collective}: ring {ring.ring_id} was closed; create it again and pass the new "
                f"ring"
            )
        return ring.ring_id
    if isinstance(ring, str) and ring.lower() not in NAMES:
        return comm(ring).ring_id
    if is_torch_reduction(ring):  # it equals a ring's number
        raise RingError(
            f"{collective}: {role}={ring}; expected a ring, its id or its name; pass the "
            f"reduction as op="
        )
    if isinstance(ring, torch.Tensor):
        raise ArgumentError(
            f"{collective}: {role} is a tensor of shape {tuple(ring.shape)}; "
            f"{_instead(collective, role)}"
        )
    return cast(int, ring)


def _instead(collective: str, role: str) -> str:
    """Return the remedy for a tensor as a ring."""
    if role != "ring_id":
        return f"pass a ring, its id or its name as {role}="
    if collective in _WITH_OUT:
        return f"ops.{collective} takes x first; pass the output as out="
    taken = _BEFORE_RING.get(collective, "x, ") + "ring_id"
    if collective in _AFTER_RING:
        taken = f"{taken}, {_AFTER_RING[collective]}"
    return f"call ops.{collective}({taken}) with a ring, its id or its name as ring_id"


def named_reduction(collective: str, number: int, op: Any) -> LowerName:
    """Return the name of the reduction of a call that takes its registered op.

    Raises:
        ArgumentError: ``op`` is not a reduction.
    """
    name = reduction_name(op)
    if not isinstance(name, str):
        raise ArgumentError(f"{collective} on ring {number}: {unknown(op)}")
    return name


def eager_ring(
    collective: str,
    number: int,
    x: torch.Tensor,
    out: torch.Tensor | None,
    use_calc_stream: bool,
    sync_op: bool,
) -> CommContext | None:
    """Return the ring that makes a call itself, whose tensors may be of any kind.

    Returns:
        None if the call takes its registered op: under torch.compile, a mode or a trace, for a
        gradient, and for tensors without memory.

    Raises:
        As ``comm`` and ``registered``.
    """
    if registered(collective, x, number, out, use_calc_stream, sync_op):
        return None
    return comm(number)
