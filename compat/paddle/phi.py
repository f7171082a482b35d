"""The collectives of Paddle 3: names without a prefix, and no ``use_calc_stream``.

They run on the current stream. None has a gradient.
"""

from collections.abc import Sequence

import torch

from commlib import ops
from commlib.compat.paddle.checks import detached, position, ring_of, ring_of_size
from commlib.compat.paddle.dtypes import Dtype
from commlib.compat.paddle.moves import alltoall, c_allgather, c_broadcast
from commlib.compat.paddle.point_to_point import recv_v2, send_v2
from commlib.compat.paddle.reductions import all_reduced, c_reducescatter
from commlib.compat.paddle.root_reductions import reduced
from commlib.engines.reduction_names import ReductionName
from commlib.errors import ArgumentError

Tensor = torch.Tensor

_REDUCTIONS: tuple[ReductionName, ...] = ("sum", "max", "min", "prod", "avg")


def all_gather(x: Tensor, ring_id: int = 0, nranks: int = 0) -> Tensor:
    """Return, on every rank, the ``x`` of all ranks concatenated along dim 0, in rank order.

    Source: operator ``all_gather``.

    Args:
        x: [n, …] of any dtype, the same shape on every rank.
        ring_id: The ring.
        nranks: Size of the ring.

    Returns:
        [n * nranks, …]; for a 0-D ``x`` [nranks].

    Raises:
        ArgumentError: ``nranks`` differs from the ring's size.
    """
    ring_of_size("all_gather", ring_id, nranks)
    return c_allgather(x, ring_id, nranks, use_calc_stream=True)


def all_reduce(x: Tensor, ring_id: int = 0, reduce_type: int = 0) -> Tensor:
    """Return, on every rank, the reduction of ``x`` over the ring.

    Source: operator ``all_reduce``.

    Args:
        x: Any shape, the same on every rank.
        ring_id: The ring.
        reduce_type: 0 sum, 1 max, 2 min, 3 prod, 4 avg.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        ArgumentError: ``reduce_type`` is none of these.
        CommError: As ``ops.all_reduce``.
    """
    op = reduction_of("all_reduce", ring_id, reduce_type)
    return all_reduced("all_reduce", op, x, ring_id, use_calc_stream=True)


def all_to_all(x: Tensor, ring_id: int = 0) -> Tensor:
    """Return, on rank r, the r-th part along dim 0 of every rank's ``x``, in rank order.

    Source: operator ``all_to_all``.

    Args:
        x: [n, …] of any dtype; the ring's size must divide n.
        ring_id: The ring.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        ShapeError: ``x`` is 0-D, or the ring's size does not divide n.
    """
    ring_of("all_to_all", ring_id)
    return alltoall(x, ring_id, use_calc_stream=True)


def broadcast(x: Tensor, ring_id: int = 0, root: int = 0) -> Tensor:
    """Return, on every rank, the ``x`` of position ``root``.

    Source: operator ``broadcast``.

    Args:
        x: Any shape and dtype, the same on every rank.
        ring_id: The ring.
        root: Position of the sender in the ring.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        PeerError: ``root`` is not a position in the ring.
    """
    position("broadcast", ring_of("broadcast", ring_id), "root", root)
    return c_broadcast(x, ring_id, root, use_calc_stream=True)


def reduce(x: Tensor, ring_id: int = 0, root_id: int = 0, reduce_type: int = 0) -> Tensor:
    """Return the reduction of ``x`` over the ring on position ``root_id``.

    Source: operator ``reduce``.

    Args:
        x: Any shape, the same on every rank.
        ring_id: The ring.
        root_id: Position of the root in the ring.
        reduce_type: 0 sum, 1 max, 2 min, 3 prod, 4 avg.

    Returns:
        A new tensor of the shape of ``x``. On other ranks it is a copy of ``x``.

    Raises:
        ArgumentError: ``reduce_type`` is none of these.
        PeerError: ``root_id`` is not a position in the ring.
        CommError: As ``ops.reduce``.
    """
    op = reduction_of("reduce", ring_id, reduce_type)
    return reduced("reduce", op, x, ring_id, root_id, use_calc_stream=True)


def reduce_scatter(x: Tensor, ring_id: int = 0, nranks: int = 1) -> Tensor:
    """Return, on rank r, the r-th part along dim 0 of the sum of ``x`` over the ring.

    Source: operator ``reduce_scatter``.

    Args:
        x: [n, …], the same shape on every rank; ``nranks`` must divide n.
        ring_id: The ring.
        nranks: Size of the ring.

    Returns:
        [n / nranks, …].

    Raises:
        ArgumentError: ``nranks`` differs from the ring's size.
        ShapeError: ``nranks`` does not divide n.
    """
    ring_of_size("reduce_scatter", ring_id, nranks)
    return c_reducescatter(x, ring_id, nranks, use_calc_stream=True)


def dist_concat(x: Tensor, ring_id: int = 0, nranks: int = 1) -> Tensor:
    """Return, on every rank, the ``x`` of all ranks concatenated along the last axis.

    Source: operator ``dist_concat``.

    Args:
        x: [..., n] of any dtype, the same shape on every rank.
        ring_id: The ring.
        nranks: Size of the ring.

    Returns:
        [..., n * nranks].

    Raises:
        ArgumentError: ``nranks`` differs from the ring's size.
        CommError: As ``ops.concat``.
    """
    ring_of_size("dist_concat", ring_id, nranks)
    return ops.concat(detached(x), ring_id)


def p_send(x: Tensor, ring_id: int = 0, peer: int = 0, dynamic_shape: bool = False) -> None:
    """Send ``x`` to position ``peer``, which calls ``p_recv``.

    Source: operator ``p_send``.

    Args:
        x: Any shape and dtype.
        ring_id: The ring.
        peer: Position of the receiver in the ring.
        dynamic_shape: True sends the number of dims and the dims first, both as int32. This header
            needs eager code outside captures and ``ring.group()``.

    Raises:
        PeerError: ``peer`` is not a position in the ring, or is this rank.
        ArgumentError: ``dynamic_shape`` in compiled code, a capture or a group.
    """
    position("p_send", ring_of("p_send", ring_id), "peer", peer)
    send_v2(x, ring_id, peer, use_calc_stream=True, dynamic_shape=dynamic_shape)


def p_recv(
    ring_id: int = 0,
    peer: int = 0,
    dtype: Dtype = torch.float32,
    out_shape: Sequence[int] = (),
    dynamic_shape: bool = False,
) -> Tensor:
    """Return the tensor that position ``peer`` sends with ``p_send``.

    Source: operator ``p_recv``.

    Args:
        ring_id: The ring.
        peer: Position of the sender in the ring.
        dtype: A torch dtype, its name, or Paddle's code (5 is float32).
        out_shape: Shape of the tensor, every dim at least 1.
        dynamic_shape: True ignores ``out_shape`` and receives the shape; the host waits for it.

    Returns:
        A new tensor.

    Raises:
        PeerError: ``peer`` is not a position in the ring, or is this rank.
        ShapeError: ``out_shape`` is empty or has a dim below 1.
        DtypeError: ``dtype`` is unknown.
        ArgumentError: ``dynamic_shape`` in compiled code, a capture or a group.
    """
    position("p_recv", ring_of("p_recv", ring_id), "peer", peer)
    return recv_v2(
        out_shape, dtype, peer, ring_id, use_calc_stream=True, dynamic_shape=dynamic_shape
    )


def p_send_array(x: Sequence[Tensor], ring_id: int = 0, peer: int = 0) -> None:
    """Send each tensor of the list ``x`` to position ``peer``, which calls ``p_recv_array``.

    Source: operator ``p_send_array``.

    Args:
        x: Tensors of one dtype.
        ring_id: The ring.
        peer: Position of the receiver in the ring.

    Raises:
        PeerError: ``peer`` is not a position in the ring, or is this rank.
    """
    ring = ring_of("p_send_array", ring_id)
    position("p_send_array", ring, "peer", peer)
    for each in x:
        send_v2(each, ring_id, peer, use_calc_stream=True)


def p_recv_array(
    ring_id: int = 0,
    peer: int = 0,
    dtype: Dtype = torch.float32,
    out_shapes: Sequence[Sequence[int]] = (),
) -> list[Tensor]:
    """Return the tensors that position ``peer`` sends with ``p_send_array``.

    Source: operator ``p_recv_array``. Upstream takes the shapes from an array that the program has
    allocated; here they are an argument.

    Args:
        ring_id: The ring.
        peer: Position of the sender in the ring.
        dtype: A torch dtype, its name, or Paddle's code (5 is float32).
        out_shapes: The shape of each tensor.

    Returns:
        One new tensor per shape.

    Raises:
        PeerError: ``peer`` is not a position in the ring, or is this rank.
        ShapeError: A shape is empty or has a dim below 1.
        DtypeError: ``dtype`` is unknown.
    """
    position("p_recv_array", ring_of("p_recv_array", ring_id), "peer", peer)
    return [recv_v2(shape, dtype, peer, ring_id, use_calc_stream=True) for shape in out_shapes]


def reduction_of(name: str, ring_id: int, reduce_type: int) -> ReductionName:
    """Return the reduction of a number.

    Raises:
        ArgumentError: There is none.
    """
    ring = ring_of(name, ring_id)
    if isinstance(reduce_type, bool) or reduce_type not in range(len(_REDUCTIONS)):
        choices = ", ".join(f"{number} {op}" for number, op in enumerate(_REDUCTIONS))
        raise ArgumentError(
            f"{ring._describe(name)}: reduce_type={reduce_type!r}; expected one of {choices}; pass "
            f"reduce_type=0"
        )
    return _REDUCTIONS[reduce_type]
