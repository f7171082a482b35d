"""partial_all_gather: every rank gives its own slice of a tensor and ends with all of them."""

from typing import Any

import torch

from commlib.core.manager import comm
from commlib.ops.pipeline_parallel.slices import bounds, joined, slice_views
from commlib.ops.registered.library import checked, deliver, like, raw_output, register, traced


def partial_all_gather(
    x: torch.Tensor,
    ring_id: int = 0,
    *,
    out: torch.Tensor | None = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> Any:
    """Return the shape of ``x`` with slice r of the flattened tensor from rank r.

    ``x``: any shape and dtype, the same on every rank, its number of elements divisible by the
    ring's size. ``out=x`` completes a tensor in place of which ``partial_recv`` has filled the own
    slice. Of a strided ``x`` the own slice alone is copied, and such a call is always fenced. With
    ``sync_op=False`` returns a ``Work``. No gradient. Streams as ``all_gather``. Raises
    ``ShapeError``, ``DtypeError``, ``RingError``. Source: operator ``partial_allgather``.
    """
    if traced("partial_all_gather", use_calc_stream, sync_op, ring_id, x=x, out=out):
        return deliver(_registered_op(x.detach(), ring_id, use_calc_stream), out, sync_op)
    ring = checked("partial_all_gather", x, ring_id)
    parts = _own(x.detach(), ring_id)
    fenced = fenced or len(parts) > 1  # the copy of several is made on the current stream
    if out is None:
        out = like(x) if fenced or use_calc_stream else raw_output(ring, like, x)
    return ring.all_gather(
        out, joined(parts), use_calc_stream=use_calc_stream, sync_op=sync_op, fenced=fenced
    )


def _own(x: torch.Tensor, ring_id: int) -> list[torch.Tensor]:
    ring = comm(ring_id)
    first, last = bounds("partial_all_gather", x, ring_id, ring.size, ring.rank)
    return slice_views(x, first, last)


def _run(x: torch.Tensor, ring_id: int, use_calc_stream: bool) -> Any:
    own = joined(_own(x, ring_id))
    return comm(ring_id).all_gather(like(x), own, use_calc_stream=use_calc_stream)


def _fake(x: torch.Tensor, ring_id: int, use_calc_stream: bool) -> torch.Tensor:
    return like(x)


_registered_op = register(
    "partial_all_gather(Tensor x, int ring_id, bool use_calc_stream) -> Tensor", _run, _fake
)
