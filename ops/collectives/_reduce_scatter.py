"""reduce_scatter: rank r ends with the r-th part of the reduction over all ranks."""

from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.manager import comm
from commlib.errors import ArgumentError
from commlib.ops.registered.library import deliver, raw_output, register, registered, rows_of, save
from commlib.ops.registered.traced_ring import size_of, sized


def reduce_scatter(
    x: torch.Tensor,
    ring_id: int = 0,
    *,
    op: str = "sum",
    out: torch.Tensor | None = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> Any:
    """Return, on rank r, the r-th part along dim 0 of the reduction of ``x`` over the ring.

    ``x``: [n, …] with n divisible by the ring's size; the result is [n / size, …]. ``op`` and
    dtypes as ``all_reduce`` (without premul_sum). Gradient (sum, avg): all_gather. Streams and
    errors as ``all_reduce``; ``ShapeError`` when n does not divide.
    """
    if registered("reduce_scatter", x, ring_id, out, use_calc_stream, sync_op):
        return deliver(
            _registered_op(x, ring_id, size_of(ring_id), op, use_calc_stream), out, sync_op
        )
    ring = comm(ring_id)
    if out is None:
        out = _new(ring, x) if fenced or use_calc_stream else raw_output(ring, _new, ring, x)
    return ring.reduce_scatter(
        out, x, op=op, use_calc_stream=use_calc_stream, sync_op=sync_op, fenced=fenced
    )


def _new(ring: CommContext, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(rows_of(ring.where("reduce_scatter"), x, ring.size))


def _run(x: torch.Tensor, ring_id: int, size: int, op: str, use_calc_stream: bool) -> Any:
    ring = sized("reduce_scatter", ring_id, size)
    return ring.reduce_scatter(_new(ring, x), x, op=op, use_calc_stream=use_calc_stream)


def _fake(x: torch.Tensor, ring_id: int, size: int, op: str, use_calc_stream: bool) -> torch.Tensor:
    return _new(sized("reduce_scatter", ring_id, size), x)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    ring_id, size, op, use_calc_stream = ctx.saved
    if op not in ("sum", "avg"):
        raise ArgumentError(f"reduce_scatter with op={op!r} has no gradient; pass x.detach()")
    whole = torch.ops.commlib.all_gather(grad, ring_id, size, use_calc_stream)
    return whole / size if op == "avg" else whole, None, None, None, None


_registered_op = register(
    "reduce_scatter(Tensor x, int ring_id, int size, str op, bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    setup=save(1, 2, 3, 4),
    backward=_backward,
    vmap="last",
)
