"""Legacy operators that move whole tensors: c_allgather, c_broadcast, c_scatter, alltoall."""

import torch

from commlib import ops
from commlib.compat.paddle.checks import (
    detached,
    position,
    ring_of,
    ring_of_size,
    tensor_with_rows,
)


def c_allgather(
    x: torch.Tensor, ring_id: int = 0, nranks: int | None = None, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return, on every rank, the ``x`` of all ranks concatenated along dim 0, in rank order.

    Source: operator ``c_allgather``. It has no gradient.

    Args:
        x: [n, …] of any dtype, the same shape on every rank.
        ring_id: The ring.
        nranks: Size of the ring. It is required, although an argument before it has a default.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        [n * nranks, …]; for a 0-D ``x`` [nranks].

    Raises:
        ArgumentError: ``nranks`` differs from the ring's size.
    """
    ring_of_size("c_allgather", ring_id, nranks)
    gathered: torch.Tensor = ops.all_gather(
        detached(x), ring_id, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return gathered


def c_broadcast(
    x: torch.Tensor, ring_id: int = 0, root: int = 0, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return, on every rank, the ``x`` of position ``root``.

    Source: operator ``c_broadcast``. It has no gradient.

    Args:
        x: Any shape and dtype, the same on every rank.
        ring_id: The ring.
        root: Position of the sender in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        PeerError: ``root`` is not a position in the ring.
    """
    root = position("c_broadcast", ring_of("c_broadcast", ring_id), "root", root)
    copy: torch.Tensor = ops.broadcast(
        detached(x), ring_id, root=root, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return copy


def c_scatter(
    x: torch.Tensor,
    ring_id: int = 0,
    root: int = 0,
    nranks: int = 0,
    use_calc_stream: bool = False,
) -> torch.Tensor:
    """Return, on rank r, the r-th part along dim 0 of the ``x`` of position ``root``.

    Source: operator ``c_scatter``. It has no gradient.

    Args:
        x: [n, …] of any dtype, the full shape on every rank.
        ring_id: The ring.
        root: Position of the sender in the ring.
        nranks: Size of the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        [n // nranks, …]. As upstream, the remainder of n / nranks is dropped.

    Raises:
        ArgumentError: ``nranks`` differs from the ring's size.
        PeerError: ``root`` is not a position in the ring.
        ShapeError: ``x`` is 0-D.
    """
    ring = ring_of_size("c_scatter", ring_id, nranks)
    root = position("c_scatter", ring, "root", root)
    count = tensor_with_rows("c_scatter", ring, x).shape[0] // ring.size * ring.size
    part: torch.Tensor = ops.scatter(
        detached(x)[:count],
        ring_id,
        root=root,
        use_calc_stream=use_calc_stream,
        fenced=use_calc_stream,
    )
    return part


def alltoall(x: torch.Tensor, ring_id: int = 0, use_calc_stream: bool = False) -> torch.Tensor:
    """Return, on rank r, the r-th part along dim 0 of every rank's ``x``, in rank order.

    Source: operator ``alltoall``. It has no gradient.

    Args:
        x: [n, …] of any dtype; the ring's size must divide n.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        ShapeError: ``x`` is 0-D, or the ring's size does not divide n.
    """
    tensor_with_rows("alltoall", ring_of("alltoall", ring_id), x)
    exchanged: torch.Tensor = ops.all_to_all(
        detached(x), ring_id, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return exchanged
