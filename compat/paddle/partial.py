"""The legacy operators on slices: partial_send, partial_recv, partial_allgather."""

from collections.abc import Sequence

import torch

from commlib import ops
from commlib.compat.paddle.checks import cut, placed, position, ring, tensor
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

    ``x``: any shape and dtype, its elements divisible by ``num``. Raw on the comm stream by
    default. Raises ``PeerError``, ``ArgumentError``, ``ShapeError``. Source: operator
    ``partial_send``.
    """
    context = ring("partial_send", ring_id)
    position("partial_send", context, "peer", peer)
    ops.partial_send(
        cut(x),
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
    """Return a tensor whose slice ``id`` of ``num`` is what position ``peer`` sends.

    ``out_shape``: its shape, every dim 1 or above. The other slices are not set: a
    ``partial_allgather`` completes them. ``dtype`` and ``device`` as ``recv_v2``. Raw on the comm
    stream by default. Raises as ``partial_send``. Source: operator ``partial_recv``.
    """
    context = ring("partial_recv", ring_id)
    position("partial_recv", context, "peer", peer)
    given = "partial_recv", context, tuple(out_shape), dtype, device
    out = new_tensor(*given) if use_calc_stream else raw_output(context, new_tensor, *given)
    got: torch.Tensor = ops.partial_recv(
        out,
        ring_id,
        peer=peer,
        num=num,
        id=id,
        use_calc_stream=use_calc_stream,
        fenced=use_calc_stream,
    )
    return got


def partial_allgather(
    x: torch.Tensor,
    nranks: int,
    rank: int,
    ring_id: int = 0,
    use_calc_stream: bool = False,
) -> torch.Tensor:
    """Fill slice r of the flattened ``x`` from position r, in place, and return ``x``.

    ``x``: any shape and dtype, its elements divisible by ``nranks``; this rank's own slice is what
    the others get. Raw on the comm stream by default. No gradient. Raises ``ArgumentError`` when
    ``nranks`` or ``rank`` is not the ring's, ``ShapeError``. Source: operator
    ``partial_allgather``.
    """
    context = placed("partial_allgather", ring_id, nranks, rank)
    given = cut(tensor("partial_allgather", context, x))
    ops.partial_all_gather(
        given, ring_id, out=given, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return x
