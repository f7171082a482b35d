"""Arguments of several forms: a ring, its id or its name; a reduction by name or torch's enum."""

from typing import Any, Literal, TypeAlias, cast, get_args

import torch
import torch.distributed as dist

from commlib.core.context import CommContext
from commlib.core.manager import _rings, comm
from commlib.errors import ArgumentError, RingError
from commlib.ops.registered.library import registered

ReductionName: TypeAlias = Literal["sum", "prod", "min", "max", "avg"]
UpperName: TypeAlias = Literal["SUM", "PROD", "MIN", "MAX", "AVG"]
Reduction: TypeAlias = ReductionName | UpperName | dist.ReduceOp.RedOpType
Ring: TypeAlias = int | str | CommContext

# Names as the engines know them; other forms are looked up by ``reduction_name``.
REDUCTIONS: dict[Any, ReductionName] = {op: op for op in get_args(ReductionName)}
_NAMES: dict[str, Any] = {op: op for op in ("sum", "prod", "min", "max", "avg", "premul_sum")}
# Compared with ==, which also holds between a ReduceOp and its RedOpType.
_TORCH_REDUCTIONS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.PRODUCT, "prod"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.AVG, "avg"),
)
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


def ring_number(collective: str, ring: Any) -> int:
    """Return the id of ``ring``: a ring, its id or its name. ``comm`` refuses an invalid id.

    Raises:
        ArgumentError: ``ring`` is a tensor: the call has the order of torch.distributed.
        RingError: The ring is closed, a bool or a reduction.
    """
    if type(ring) is int:
        return ring
    if isinstance(ring, bool):
        raise RingError(
            f"{collective}: ring_id={ring}; expected a ring, its id or its name; a bool is none"
        )
    if isinstance(ring, CommContext):
        if _rings.get(ring.ring_id) is not ring:
            raise RingError(
                f"{collective}: ring {ring.ring_id} was closed; create it again and pass the new "
                f"ring"
            )
        return ring.ring_id
    if isinstance(ring, str) and ring.lower() not in _NAMES:
        return comm(ring).ring_id
    if isinstance(ring, (dist.ReduceOp, dist.ReduceOp.RedOpType)):  # it equals a ring's number
        raise RingError(
            f"{collective}: ring_id={ring}; expected a ring, its id or its name; pass the "
            f"reduction as op="
        )
    if isinstance(ring, torch.Tensor) and collective in _WITH_OUT:
        raise ArgumentError(
            f"{collective}: ring_id is a tensor of shape {tuple(ring.shape)}; ops.{collective} "
            f"takes x first; pass the output as out="
        )
    if isinstance(ring, torch.Tensor):
        raise ArgumentError(
            f"{collective}: ring_id is a tensor of shape {tuple(ring.shape)}; pass one tensor to "
            f"ops.{collective}, then a ring, its id or its name"
        )
    return cast(int, ring)


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


def reduction_name(op: Any) -> ReductionName:
    """Return the lower-case name of ``op``; an unknown reduction is left to the engine."""
    if isinstance(op, str):
        name: ReductionName = _NAMES.get(op) or _NAMES.get(op.lower(), op)
        return name
    if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):  # an int equals them too
        for reduction, torch_name in _TORCH_REDUCTIONS:
            if op == reduction:
                return cast(ReductionName, torch_name)
    return cast(ReductionName, op)
