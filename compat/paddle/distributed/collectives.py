"""Collectives as ``paddle.distributed`` has them: on the comm stream, the current stream waits.

Roots and peers are global ranks. Tensors are written in place, outside autograd. On a process that
is not a member of the group, a call warns and returns None. ``stream`` describes every call.
"""

from collections.abc import Sequence

import torch

from commlib.compat.paddle.distributed import stream
from commlib.compat.paddle.distributed.argument_order import output_first_in_paddle_3
from commlib.compat.paddle.distributed.groups import Group
from commlib.compat.paddle.distributed.reduce_op import ReduceOp
from commlib.compat.paddle.distributed.tasks import Task

Tensor = torch.Tensor


def all_reduce(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: Group | None = None, sync_op: bool = True
) -> Task | None:
    """Reduce ``tensor`` over the group, in place.

    Args:
        tensor: Any shape, the same on every rank. The reduction is written to it.
        op: The reduction.
        group: The group; None for the group of all ranks.
        sync_op: True makes the current stream wait for the call; False leaves that to ``wait()`` of
            the task.

    Returns:
        The task; None on a process that is not in the group.

    Raises:
        CommError: As ``ring.all_reduce``.
    """
    return stream.all_reduce(tensor, op, group, sync_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group | None = None, sync_op: bool = True
) -> Task | None:
    """Gather the ``tensor`` of every rank in ``tensor_list``, on every rank.

    Args:
        tensor_list: The output: an empty list, or one of ``size`` tensors of the input's shape.
        tensor: Any shape, the same on every rank.
        group: The group; None for the group of all ranks.
        sync_op: True makes the current stream wait for the call; False leaves that to ``wait()`` of
            the task.

    Returns:
        The task. With ``sync_op=False`` a list of the caller's tensors is filled by ``wait()``.

    Raises:
        RingError: This process is not a member of the group.
        CommError: As ``ring.all_gather``.
    """
    return stream.all_gather(tensor_list, tensor, group, sync_op)


def reduce(
    tensor: Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
) -> Task | None:
    """Reduce ``tensor`` over the group to ``dst``, in place there.

    Args:
        tensor: Any shape, the same on every rank. The reduction is written to it on ``dst``.
        dst: Global rank of the receiver.
        op: The reduction.
        group: The group; None for the group of all ranks.
        sync_op: True makes the current stream wait for the call; False leaves that to ``wait()`` of
            the task.

    Returns:
        The task; None on a process that is not in the group.

    Raises:
        PeerError: ``dst`` is not in the group.
        CommError: As ``ring.reduce``.
    """
    return stream.reduce(tensor, dst, op, group, sync_op)


def broadcast(
    tensor: Tensor, src: int, group: Group | None = None, sync_op: bool = True
) -> Task | None:
    """Fill ``tensor`` of every rank with that of ``src``.

    Args:
        tensor: Any shape, the same on every rank. Input on ``src``, output elsewhere.
        src: Global rank of the sender.
        group: The group; None for the group of all ranks.
        sync_op: True makes the current stream wait for the call; False leaves that to ``wait()`` of
            the task.

    Returns:
        The task; None on a process that is not in the group.

    Raises:
        PeerError: ``src`` is not in the group.
        CommError: As ``ring.broadcast``.
    """
    return stream.broadcast(tensor, src, group, sync_op)


def scatter(
    tensor: Tensor,
    tensor_list: list[Tensor] | None = None,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
) -> Task | None:
    """Fill ``tensor`` of rank r with tensor r of the list of ``src``.

    Args:
        tensor: The output.
        tensor_list: The input on ``src``: ``size`` tensors of the output's shape; ignored
            elsewhere.
        src: Global rank of the sender.
        group: The group; None for the group of all ranks.
        sync_op: True makes the current stream wait for the call; False leaves that to ``wait()`` of
            the task.

    Returns:
        The task; None on a process that is not in the group.

    Raises:
        PeerError: ``src`` is not in the group.
        ArgumentError: There is no input on ``src``.
        CommError: As ``ring.scatter``.
    """
    return stream.scatter(tensor, tensor_list, src, group, sync_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
) -> Task | None:
    """Gather the ``tensor`` of every rank in the list of ``dst``.

    Args:
        tensor: Any shape, the same on every rank.
        gather_list: The output on ``dst``: an empty list, or one of ``size`` tensors of the input's
            shape; ignored elsewhere.
        dst: Global rank of the receiver.
        group: The group; None for the group of all ranks.
        sync_op: True makes the current stream wait for the call; False leaves that to ``wait()`` of
            the task.

    Returns:
        The task; None on a process that is not in the group. With ``sync_op=False`` a list of the
        caller's tensors is filled by ``wait()``.

    Raises:
        PeerError: ``dst`` is not in the group.
        ArgumentError: There is no list on ``dst``.
        CommError: As ``ring.gather``.
    """
    return stream.gather(tensor, gather_list, dst, group, sync_op)


def reduce_scatter(
    tensor: Tensor,
    tensor_list: list[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
) -> Task | None:
    """Fill ``tensor`` of rank r with the reduction of tensor r of the lists.

    Args:
        tensor: The output.
        tensor_list: The input: ``size`` tensors of the output's shape.
        op: The reduction.
        group: The group; None for the group of all ranks.
        sync_op: True makes the current stream wait for the call; False leaves that to ``wait()`` of
            the task.

    Returns:
        The task; None on a process that is not in the group.

    Raises:
        CommError: As ``ring.reduce_scatter``.
    """
    return stream.reduce_scatter(tensor, tensor_list, op, group, sync_op)


@output_first_in_paddle_3
def alltoall(
    in_tensor_list: Tensor | list[Tensor],
    out_tensor_list: Tensor | list[Tensor],
    group: Group | None = None,
    sync_op: bool = True,
) -> Task | None:
    """Send part j of the input to rank j; the input is first in Paddle 2, the output in Paddle 3.

    ``FLAGS_comm_paddle_version`` is 2 or 3; keywords need no flag. ``stream.alltoall`` takes the
    output first in both.

    Args:
        in_tensor_list: The input: a tensor of ``size`` equal parts along dim 0, or a list of
            ``size`` tensors, which may differ in shape.
        out_tensor_list: The output: a tensor; or an empty list, which gets tensors of the input's
            shapes; or a list of ``size`` tensors.
        group: The group; None for the group of all ranks.
        sync_op: True makes the current stream wait for the call; False leaves that to ``wait()`` of
            the task.

    Returns:
        The task; None on a process that is not in the group. With ``sync_op=False`` a list of the
        caller's tensors is filled by ``wait()``.

    Raises:
        ArgumentError: One of both is a tensor and the other one is a list.
        CommError: As ``ring.all_to_all``.
    """
    return stream.alltoall(out_tensor_list, in_tensor_list, group, sync_op)


@output_first_in_paddle_3
def alltoall_single(
    in_tensor: Tensor,
    out_tensor: Tensor,
    in_split_sizes: Sequence[int] | None = None,
    out_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    sync_op: bool = True,
) -> Task | None:
    """Send rows of the input to every rank; the input is first in Paddle 2, the output in Paddle 3.

    Source: ``alltoall_single`` of ``paddle.distributed``. ``FLAGS_comm_paddle_version`` is 2 or 3;
    keywords need no flag. The sizes of the input are first in both. ``stream.alltoall_single``
    takes the output first in both, also its sizes.

    Args:
        in_tensor: The input, rows along dim 0.
        out_tensor: The output, rows along dim 0.
        in_split_sizes: Rows to each rank. Default, also for an empty list: equal parts. All ranks
            pass sizes, or none does.
        out_split_sizes: Rows from each rank, likewise.
        group: The group; None for the group of all ranks.
        sync_op: True makes the current stream wait for the call; False leaves that to ``wait()`` of
            the task.

    Returns:
        The task; None on a process that is not in the group.

    Raises:
        ShapeError: Sizes do not add up to the rows.
        CommError: As ``ring.all_to_all``.
    """
    return stream.alltoall_single(
        out_tensor, in_tensor, out_split_sizes, in_split_sizes, group, sync_op
    )
