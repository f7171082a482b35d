"""gather: the root ends with the tensors of all ranks, the others with nothing."""

from typing import Any

import torch

from commlib._manager import comm
from commlib.ops._library import deliver, raw_output, register, rows, traced


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
        result = _twin(x.detach(), ring_id, root, use_calc_stream)
        if out is not None and comm(ring_id).rank != root:
            result, out = out, None
        return deliver(result, out, sync_op)
    context = comm(ring_id)
    if out is None:
        out = (
            _new(x, ring_id, root)
            if fenced or use_calc_stream
            else raw_output(context, _new, x, ring_id, root)
        )
    return context.gather(
        out, x, root=root, use_calc_stream=use_calc_stream, sync_op=sync_op, fenced=fenced
    )


def _new(x: torch.Tensor, ring_id: int, root: int) -> torch.Tensor:
    context, (count, rest) = comm(ring_id), rows(x)
    return x.new_empty((count * context.size if context.rank == root else 0, *rest))


def _run(x: torch.Tensor, ring_id: int, root: int, use_calc_stream: bool) -> Any:
    out = _new(x, ring_id, root)
    return comm(ring_id).gather(out, x, root=root, use_calc_stream=use_calc_stream)


def _fake(x: torch.Tensor, ring_id: int, root: int, use_calc_stream: bool) -> torch.Tensor:
    return _new(x, ring_id, root)


_twin = register(
    "gather(Tensor x, int ring_id, int root, bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    vmap="last",
)
