"""gather: the root ends with the tensors of all ranks, the others with nothing."""

from typing import Any

import torch

from commlib.core.manager import comm
from commlib.ops.registered.library import deliver, raw_output, register, rows, traced
from commlib.ops.registered.traced_ring import rank_of, size_of, sized


def gather(
    x: torch.Tensor,
    ring_id: int = 0,
    *,
    root: int = 0,
    out: torch.Tensor | None = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> Any:
    """Return the ``x`` of rank 0, 1, … along dim 0 on ``root``, and an empty tensor elsewhere.

    ``x``: [n, …] of any dtype, the same shape on every rank; root gets [n * size, …], the others
    [0, …]. ``out`` is not written elsewhere than on root. No gradient. Streams and errors as
    ``all_reduce``.
    """
    if traced("gather", use_calc_stream, sync_op, ring_id, x=x, out=out):
        size, rank = size_of(ring_id), rank_of(ring_id)
        result = _registered_op(x.detach(), ring_id, size, rank, root, use_calc_stream)
        if out is not None and rank != root:
            result, out = out, None
        return deliver(result, out, sync_op)
    ring = comm(ring_id)
    if out is None:
        out = (
            _new(x, ring.size, ring.rank == root)
            if fenced or use_calc_stream
            else raw_output(ring, _new, x, ring.size, ring.rank == root)
        )
    return ring.gather(
        out, x, root=root, use_calc_stream=use_calc_stream, sync_op=sync_op, fenced=fenced
    )


def _new(x: torch.Tensor, size: int, at_root: bool) -> torch.Tensor:
    count, rest = rows(x)
    return x.new_empty((count * size if at_root else 0, *rest))


def _run(
    x: torch.Tensor, ring_id: int, size: int, rank: int, root: int, use_calc_stream: bool
) -> Any:
    ring = sized("gather", ring_id, size, rank)
    out = _new(x, size, rank == root)
    return ring.gather(out, x, root=root, use_calc_stream=use_calc_stream)


def _fake(
    x: torch.Tensor, ring_id: int, size: int, rank: int, root: int, use_calc_stream: bool
) -> torch.Tensor:
    sized("gather", ring_id, size, rank)
    return _new(x, size, rank == root)


_registered_op = register(
    "gather(Tensor x, int ring_id, int size, int rank, int root, bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    vmap="last",
)
