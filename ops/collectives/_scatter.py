"""scatter: rank r ends with the r-th part of the root's tensor."""

from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.manager import comm
from commlib.ops.registered.library import deliver, raw_output, register, rows_of, traced
from commlib.ops.registered.traced_ring import size_of, sized


def scatter(
    x: torch.Tensor,
    ring_id: int = 0,
    *,
    root: int = 0,
    out: torch.Tensor | None = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> Any:
    """Return, on rank r, the r-th part along dim 0 of the ``x`` of position ``root``.

    ``x``: [n, …] of any dtype with n divisible by the ring's size, the same shape on every rank;
    elsewhere than on root only shape and dtype count. The result is [n / size, …]. No gradient.
    Streams and errors as ``all_reduce``; ``ShapeError`` when n does not divide.
    """
    if traced("scatter", use_calc_stream, sync_op, ring_id, x=x, out=out):
        result = _registered_op(x.detach(), ring_id, size_of(ring_id), root, use_calc_stream)
        return deliver(result, out, sync_op)
    ring = comm(ring_id)
    if out is None:
        out = _new(ring, x) if fenced or use_calc_stream else raw_output(ring, _new, ring, x)
    return ring.scatter(
        out, x, root=root, use_calc_stream=use_calc_stream, sync_op=sync_op, fenced=fenced
    )


def _new(ring: CommContext, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(rows_of(ring.where("scatter"), x, ring.size))


def _run(x: torch.Tensor, ring_id: int, size: int, root: int, use_calc_stream: bool) -> Any:
    ring = sized("scatter", ring_id, size)
    return ring.scatter(_new(ring, x), x, root=root, use_calc_stream=use_calc_stream)


def _fake(
    x: torch.Tensor, ring_id: int, size: int, root: int, use_calc_stream: bool
) -> torch.Tensor:
    return _new(sized("scatter", ring_id, size), x)


_registered_op = register(
    "scatter(Tensor x, int ring_id, int size, int root, bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    vmap="last",
)
