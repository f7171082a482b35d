"""partial_recv: receive one of the equal slices of a tensor."""

from typing import Any, Literal, overload

import torch

from commlib.core.group import needs_result
from commlib.core.validation import check_out, check_peer
from commlib.core.work import Work
from commlib.errors import ArgumentError
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.collectives._recv import recv
from commlib.ops.pipeline_parallel.slices import bounds, fill, slice_views
from commlib.ops.registered.library import checked


@overload
def partial_recv(
    out: torch.Tensor,
    ring_id: Ring = ...,
    *,
    peer: int,
    num: int = ...,
    id: int = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[True] = True,
    fenced: bool = ...,
) -> torch.Tensor: ...
@overload
def partial_recv(
    out: torch.Tensor,
    ring_id: Ring = ...,
    *,
    peer: int,
    num: int = ...,
    id: int = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[False],
    fenced: bool = ...,
) -> Work[torch.Tensor]: ...
@overload
def partial_recv(
    out: torch.Tensor,
    ring_id: Ring = ...,
    *,
    peer: int,
    num: int = ...,
    id: int = ...,
    use_calc_stream: bool = ...,
    sync_op: bool,
    fenced: bool = ...,
) -> torch.Tensor | Work[torch.Tensor]: ...


def partial_recv(
    out: torch.Tensor,
    ring_id: Ring = 0,
    *,
    peer: int,
    num: int = 1,
    id: int = 0,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> torch.Tensor | Work[torch.Tensor]:
    """Receive one of the equal slices of a tensor. There is no gradient.

    ``partial_all_gather`` over another ring completes the tensor. Source: operator
    ``partial_recv``.

    Args:
        out: Any shape and dtype; the number of elements is a multiple of ``num``. The other slices
            keep their values. A slice that its strides cut into several views is received in a
            copy, always fenced, and neither with ``sync_op=False`` nor in ``ring.group()``.
        ring_id: The ring, its id or its name.
        peer: Position of the sender in the ring; it calls ``partial_send``.
        num: Number of equal slices.
        id: Index of the slice, 0 to num - 1.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream.
        sync_op: Wait for the result: the current stream on a GPU, the host on a CPU, at most for
            the ring's timeout. False, which needs ``use_calc_stream=False``: return a ``Work``
            instead.
        fenced: Order the ring's stream after the current stream. False leaves both waits to the
            program.

    Returns:
        ``out``. With ``sync_op=False`` a ``Work`` whose ``result`` is that tensor.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
        PeerError: The peer is not another position of the ring.
    """
    ring_id = ring_number("partial_recv", ring_id)
    ring = None if torch.compiler.is_compiling() else checked("partial_recv", out, ring_id)
    if ring is not None:
        check_peer(ring, "partial_recv", peer)
        check_out(ring, "partial_recv", out)
    first, last = bounds("partial_recv", out, ring_id, num, id)
    parts = slice_views(out.detach(), first, last)
    options = {"use_calc_stream": use_calc_stream, "sync_op": sync_op}
    if len(parts) == 1:
        result: Any = recv(parts[0], ring_id, peer=peer, fenced=fenced, **options)
        return out if sync_op else _SliceWork(result, out)
    if ring is not None:
        needs_result(ring, "partial_recv", "pass out.contiguous()")
    if not sync_op:
        raise ArgumentError(
            f"partial_recv on ring {ring_id}: sync_op=False with an out of strides "
            f"{out.stride()}: the received slice would not be copied to out; pass "
            f"out.contiguous(), or call it with sync_op=True"
        )
    received: Any = recv(out.new_empty(last - first), ring_id, peer=peer, **options)
    fill(parts, received)
    return out


class _SliceWork(Work):
    """The work of a slice; its result is the full tensor."""

    __slots__ = ("_part",)

    def __init__(self, part: Work, out: torch.Tensor) -> None:
        super().__init__(out, part._pending)
        self._part = part
