"""The legacy operators that move whole tensors: c_allgather, c_broadcast, c_scatter, alltoall."""

import torch

from commlib import ops
from commlib.compat.paddle.checks import cut, has_rows, position, ring, sized


def c_allgather(
    x: torch.Tensor, ring_id: int = 0, nranks: int | None = None, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return, on every rank, the ``x`` of rank 0, 1, … concatenated along dim 0.

    ``x``: [n, …] of any dtype, the same shape on every rank; the result is [n * nranks, …], for a
    0-D ``x`` [nranks]. ``nranks`` is required although an argument before it has a default. Raw on
    the comm stream by default. No gradient. Raises ``ArgumentError`` when ``nranks`` is not the
    ring's size. Source: operator ``c_allgather``.
    """
    sized("c_allgather", ring_id, nranks)
    whole: torch.Tensor = ops.all_gather(
        cut(x), ring_id, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return whole


def c_broadcast(
    x: torch.Tensor, ring_id: int = 0, root: int = 0, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return, on every rank, the ``x`` of position ``root``.

    ``x``: any shape and dtype, the same on every rank. Raw on the comm stream by default. No
    gradient. Raises ``PeerError`` for a root outside the ring. Source: operator ``c_broadcast``.
    """
    root = position("c_broadcast", ring("c_broadcast", ring_id), "root", root)
    copy: torch.Tensor = ops.broadcast(
        cut(x), ring_id, root=root, use_calc_stream=use_calc_stream, fenced=use_calc_stream
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

    ``x``: [n, …] of any dtype, the full shape on every rank; the result is [n // nranks, …]. What
    is left of n goes to nobody, as upstream. Raw on the comm stream by default. No gradient. Raises
    ``ArgumentError`` when ``nranks`` is not the ring's size, ``PeerError`` for a root outside the
    ring, ``ShapeError`` for a 0-D ``x``. Source: operator ``c_scatter``.
    """
    context = sized("c_scatter", ring_id, nranks)
    root = position("c_scatter", context, "root", root)
    count = has_rows("c_scatter", context, x).shape[0] // context.size * context.size
    part: torch.Tensor = ops.scatter(
        cut(x)[:count],
        ring_id,
        root=root,
        use_calc_stream=use_calc_stream,
        fenced=use_calc_stream,
    )
    return part


def alltoall(x: torch.Tensor, ring_id: int = 0, use_calc_stream: bool = False) -> torch.Tensor:
    """Return, on rank r, the r-th part along dim 0 of every rank's ``x``, in rank order.

    ``x``: [n, …] of any dtype with n divisible by the ring's size; the result has the same shape.
    Raw on the comm stream by default. No gradient. Raises ``ShapeError`` when n does not divide.
    Source: operator ``alltoall``.
    """
    has_rows("alltoall", ring("alltoall", ring_id), x)
    exchanged: torch.Tensor = ops.all_to_all(
        cut(x), ring_id, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return exchanged
