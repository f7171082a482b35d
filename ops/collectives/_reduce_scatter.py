"""reduce_scatter: rank r receives the r-th part of the reduction over all ranks."""

from typing import Any, Literal, overload

import torch
from torch.compiler import is_compiling

from commlib.core.context import CommContext
from commlib.core.dispatch import is_plain
from commlib.core.manager import _rings
from commlib.core.stream_mode import MODES
from commlib.core.work import Work
from commlib.engines.reduction_names import Reduction, ReductionName
from commlib.errors import ArgumentError
from commlib.ops.arguments import Ring, eager_ring, named_reduction, ring_number
from commlib.ops.registered.library import deliver, raw_output, register, rows_of, save
from commlib.ops.registered.traced_ring import size_of, sized


@overload
def reduce_scatter(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    op: Reduction = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[True] = True,
    fenced: bool = ...,
) -> torch.Tensor: ...
@overload
def reduce_scatter(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    op: Reduction = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[False],
    fenced: bool = ...,
) -> Work[torch.Tensor]: ...
@overload
def reduce_scatter(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    op: Reduction = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: bool,
    fenced: bool = ...,
) -> torch.Tensor | Work[torch.Tensor]: ...


def reduce_scatter(
    x: torch.Tensor,
    ring_id: Ring = 0,
    *,
    op: Reduction = "sum",
    out: torch.Tensor | None = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> torch.Tensor | Work[torch.Tensor]:
    """Reduce ``x`` over the ring and return this rank's part along dim 0.

    The gradient of "sum" and "avg" is the all_gather of the gradients.

    Args:
        x: [n, …], the same shape on every rank, n a multiple of the ring's size; dtypes as in
            ``all_reduce``.
        ring_id: The ring, its id or its name.
        op: "sum", "prod", "min", "max" or "avg" in any case, or a ``torch.distributed.ReduceOp``.
        out: The output, [n / size, …]. Default: a new tensor.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream.
        sync_op: Wait for the result: the current stream on a GPU, the host on a CPU, at most for
            the ring's timeout. False, which needs ``use_calc_stream=False``: return a ``Work``
            instead.
        fenced: Order the ring's stream after the current stream. False leaves both waits to the
            program.

    Returns:
        [n / size, …]: on rank r the r-th part of the reduction. With ``sync_op=False`` a ``Work``
        whose ``result`` is that tensor.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
    """
    number = ring_id if type(ring_id) is int else ring_number("reduce_scatter", ring_id)
    ring = _rings.get(number) if type(number) is int and not is_compiling() else None
    plain = ring is not None and is_plain(ring, x, x if out is None else out)
    if not plain:
        ring = eager_ring("reduce_scatter", number, x, out, use_calc_stream, sync_op)
    if ring is None:
        name = named_reduction("reduce_scatter", number, op)
        result = _registered_op(x, number, size_of(number), name, use_calc_stream)
        return deliver(result, out, sync_op)
    if out is None:
        out = _new(ring, x) if fenced or use_calc_stream else raw_output(ring, _new, ring, x)
    return ring._reduce_scatter(out, x, op, None, MODES[use_calc_stream, sync_op, fenced], plain)


def _new(ring: CommContext, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(rows_of(ring._describe("reduce_scatter"), x, ring.size))


def _run(x: torch.Tensor, ring_id: int, size: int, op: ReductionName, use_calc_stream: bool) -> Any:
    ring = sized("reduce_scatter", ring_id, size)
    return ring.reduce_scatter(_new(ring, x), x, op=op, use_calc_stream=use_calc_stream)


def _fake(x: torch.Tensor, ring_id: int, size: int, op: str, use_calc_stream: bool) -> torch.Tensor:
    return _new(sized("reduce_scatter", ring_id, size), x)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    ring_id, size, op, use_calc_stream = ctx.saved
    if op not in ("sum", "avg"):
        raise ArgumentError(f"reduce_scatter with op={op!r} has no gradient; pass x.detach()")
    gathered = torch.ops.commlib.all_gather(grad, ring_id, size, use_calc_stream)
    return gathered / size if op == "avg" else gathered, None, None, None, None


_registered_op = register(
    "reduce_scatter(Tensor x, int ring_id, int size, str op, bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    setup=save(1, 2, 3, 4),
    backward=_backward,
    vmap="last",
)
