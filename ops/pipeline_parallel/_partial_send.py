"""partial_send: send one of the equal slices of a tensor to another rank."""

from typing import Literal, overload

import torch

from commlib.core.validation import check_peer
from commlib.core.work import Work
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.collectives._send import send
from commlib.ops.pipeline_parallel.slices import bounds, joined, slice_views
from commlib.ops.registered.library import checked


@overload
def partial_send(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    peer: int,
    num: int = ...,
    id: int = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[True] = True,
    fenced: bool = ...,
) -> None: ...
@overload
def partial_send(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    peer: int,
    num: int = ...,
    id: int = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[False],
    fenced: bool = ...,
) -> Work[None]: ...
@overload
def partial_send(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    peer: int,
    num: int = ...,
    id: int = ...,
    use_calc_stream: bool = ...,
    sync_op: bool,
    fenced: bool = ...,
) -> Work[None] | None: ...


def partial_send(
    x: torch.Tensor,
    ring_id: Ring = 0,
    *,
    peer: int,
    num: int = 1,
    id: int = 0,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> Work[None] | None:
    """Send one of the equal slices of a tensor. There is no gradient.

    Source: operator ``partial_send``.

    Args:
        x: Any shape and dtype; the number of elements is a multiple of ``num``. A slice that its
            strides cut into several views is copied first, always fenced.
        ring_id: The ring, its id or its name.
        peer: Position of the receiver in the ring; it calls ``partial_recv``.
        num: Number of equal slices.
        id: Index of the slice, 0 to num - 1.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream.
        sync_op: Wait for the result: the current stream on a GPU, the host on a CPU, at most for
            the ring's timeout. False, which needs ``use_calc_stream=False``: return a ``Work``
            instead.
        fenced: Order the ring's stream after the current stream. False leaves both waits to the
            program.

    Returns:
        None, or a ``Work`` with ``sync_op=False``. On a CPU the host blocks until the bytes are
        sent.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
        PeerError: The peer is not another position of the ring.
    """
    ring_id = ring_number("partial_send", ring_id)
    if not torch.compiler.is_compiling():
        check_peer(checked("partial_send", x, ring_id), "partial_send", peer)
    first, last = bounds("partial_send", x, ring_id, num, id)
    parts = slice_views(x.detach(), first, last)
    return send(
        joined(parts),
        ring_id,
        peer=peer,
        use_calc_stream=use_calc_stream,
        sync_op=sync_op,
        fenced=fenced or len(parts) > 1,
    )
