"""gather: concatenate the tensors of all ranks on the root."""

from typing import Any, Literal, overload

import torch

from commlib.core.manager import comm
from commlib.core.work import Work
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.registered.library import deliver, raw_output, register, rows, traced
from commlib.ops.registered.traced_ring import rank_of, size_of, sized


@overload
def gather(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    root: int = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[True] = True,
    fenced: bool = ...,
) -> torch.Tensor: ...
@overload
def gather(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    root: int = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[False],
    fenced: bool = ...,
) -> Work[torch.Tensor]: ...
@overload
def gather(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    root: int = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: bool,
    fenced: bool = ...,
) -> torch.Tensor | Work[torch.Tensor]: ...


def gather(
    x: torch.Tensor,
    ring_id: Ring = 0,
    *,
    root: int = 0,
    out: torch.Tensor | None = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> torch.Tensor | Work[torch.Tensor]:
    """Concatenate the tensors of all ranks along dim 0, on root. There is no gradient.

    Args:
        x: [n, …] of any dtype, the same shape on every rank.
        ring_id: The ring, its id or its name.
        root: Position of the destination in the ring.
        out: The output, [n * size, …]; written on root only. Default: a new tensor.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream.
        sync_op: Wait for the result: the current stream on a GPU, the host on a CPU, at most for
            the ring's timeout. False, which needs ``use_calc_stream=False``: return a ``Work``
            instead.
        fenced: Order the ring's stream after the current stream. False leaves both waits to the
            program.

    Returns:
        [n * size, …] on root, [0, …] or the unchanged ``out`` on the other ranks. With
        ``sync_op=False`` a ``Work`` whose ``result`` is that tensor.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
        PeerError: ``root`` is not a position of the ring.
    """
    ring_id = ring_number("gather", ring_id)
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
