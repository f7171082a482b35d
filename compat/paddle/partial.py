"""Legacy operators on slices: partial_send, partial_recv, partial_allgather."""

from collections.abc import Sequence

import torch

from commlib import ops
from commlib.compat.paddle.checks import detached, position, ring_of, ring_of_rank, tensor
from commlib.compat.paddle.point_to_point import new_tensor
from commlib.ops.registered.library import raw_output


def partial_send(
    x: torch.Tensor,
    ring_id: int = 0,
    peer: int = 0,
    use_calc_stream: bool = False,
    num: int = 1,
    id: int = 0,
) -> None:
    """Send slice ``id`` of ``num`` of the flattened ``x`` to position ``peer``.

    Source: operator ``partial_send``.

    Args:
        x: Any shape and dtype; ``num`` must divide its number of elements.
        ring_id: The ring.
        peer: Position of the receiver in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        num: Number of slices.
        id: Index of the slice.

    Raises:
        PeerError: ``peer`` is not a position in the ring, or is this rank.
        ArgumentError: ``num`` or ``id`` is invalid.
        ShapeError: ``num`` does not divide the number of elements.
    """
    ring = ring_of("partial_send", ring_id)
    position("partial_send", ring, "peer", peer)
    ops.partial_send(
        detached(x),
        ring_id,
        peer=peer,
        num=num,
        id=id,
        use_calc_stream=use_calc_stream,
        fenced=use_calc_stream,
    )


def partial_recv(
    out_shape: Sequence[int] = (),
    dtype: torch.dtype | int | str = torch.float32,
    peer: int = 0,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    num: int = 1,
    id: int = 0,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return a tensor whose slice ``id`` of ``num`` is received from position ``peer``.

    Source: operator ``partial_recv``.

    Args:
        out_shape: Shape of the tensor, every dim at least 1.
        dtype: As in ``recv_v2``.
        peer: Position of the sender in the ring.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        num: Number of slices.
        id: Index of the slice.
        device: As in ``recv_v2``.

    Returns:
        A tensor of ``out_shape``. Its other slices are uninitialised; ``partial_allgather`` fills
        them.

    Raises:
        PeerError: ``peer`` is not a position in the ring, or is this rank.
        ArgumentError: ``num`` or ``id`` is invalid.
        ShapeError: ``out_shape`` is empty, has a dim below 1, or is not divisible by ``num``.
        DtypeError: ``dtype`` is unknown.
    """
    ring = ring_of("partial_recv", ring_id)
    position("partial_recv", ring, "peer", peer)
    arguments = "partial_recv", ring, tuple(out_shape), dtype, device
    out = new_tensor(*arguments) if use_calc_stream else raw_output(ring, new_tensor, *arguments)
    received: torch.Tensor = ops.partial_recv(
        out,
        ring_id,
        peer=peer,
        num=num,
        id=id,
        use_calc_stream=use_calc_stream,
        fenced=use_calc_stream,
    )
    return received


def partial_allgather(
    x: torch.Tensor,
    nranks: int,
    rank: int,
    ring_id: int = 0,
    use_calc_stream: bool = False,
) -> torch.Tensor:
    """Fill slice r of the flattened ``x`` from position r, in place, and return ``x``.

    Source: operator ``partial_allgather``. It has no gradient.

    Args:
        x: Any shape and dtype; ``nranks`` must divide its number of elements. This rank sends its
            own slice.
        nranks: Size of the ring.
        rank: This rank's position in the ring.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        ``x``.

    Raises:
        ArgumentError: ``nranks`` or ``rank`` differs from the ring's.
        ShapeError: ``nranks`` does not divide the number of elements.
    """
    ring = ring_of_rank("partial_allgather", ring_id, nranks, rank)
    in_place = detached(tensor("partial_allgather", ring, x))
    ops.partial_all_gather(
        in_place, ring_id, out=in_place, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return x
