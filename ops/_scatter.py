"""scatter: rank r ends with the r-th part of the root's tensor."""

from typing import Any

import torch

from commlib._manager import comm
from commlib.ops._library import deliver, raw_output, register, rows_of, traced


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
        return deliver(_twin(x.detach(), ring_id, root, use_calc_stream), out, sync_op)
    context = comm(ring_id)
    if out is None:
        out = (
            _new(x, ring_id) if fenced or use_calc_stream else raw_output(context, _new, x, ring_id)
        )
    return context.scatter(
        out, x, root=root, use_calc_stream=use_calc_stream, sync_op=sync_op, fenced=fenced
    )


def _new(x: torch.Tensor, ring_id: int) -> torch.Tensor:
    context = comm(ring_id)
    return x.new_empty(rows_of(context.where("scatter"), x, context.size))


def _run(x: torch.Tensor, ring_id: int, root: int, use_calc_stream: bool) -> Any:
    return comm(ring_id).scatter(_new(x, ring_id), x, root=root, use_calc_stream=use_calc_stream)


def _fake(x: torch.Tensor, ring_id: int, root: int, use_calc_stream: bool) -> torch.Tensor:
    return _new(x, ring_id)


_twin = register(
    "scatter(Tensor x, int ring_id, int root, bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    vmap="last",
)
