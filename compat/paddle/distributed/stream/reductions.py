"""Collectives that reduce, with a choice of the stream."""

import torch

from commlib.compat.paddle.checks import detached
from commlib.compat.paddle.distributed.groups import Group, member_ring, position_of
from commlib.compat.paddle.distributed.reduce_op import ReduceOp, reduction
from commlib.compat.paddle.distributed.stream.mode import stream_mode
from commlib.compat.paddle.distributed.tasks import Task
from commlib.compat.paddle.distributed.tensor_lists import joined

Tensor = torch.Tensor


def all_reduce(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """Reduce ``tensor`` over the group, in place on every rank.

    Args:
        tensor: Any shape, the same on every rank. Input and output.
        op: The reduction.
        group, sync_op, use_calc_stream: See ``stream``.

    Returns:
        The task.

    Raises:
        CommError: As ``ring.all_reduce``.
    """
    ring = member_ring("all_reduce", group)
    if ring is None:
        return None
    mode, x = stream_mode("all_reduce", ring, sync_op, use_calc_stream), detached(tensor)
    return Task(ring.all_reduce(x, x, op=reduction("all_reduce", op), **mode))


def reduce(
    tensor: Tensor,
    dst: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """Reduce ``tensor`` over the group to ``dst``, in place there; elsewhere it is not changed.

    Args:
        tensor: Any shape, the same on every rank.
        dst: Global rank that gets the result.
        op: The reduction.
        group, sync_op, use_calc_stream: See ``stream``.

    Returns:
        The task.

    Raises:
        PeerError: ``dst`` is not in the group.
        CommError: As ``ring.reduce``.
    """
    ring = member_ring("reduce", group)
    if ring is None:
        return None
    mode, x = stream_mode("reduce", ring, sync_op, use_calc_stream), detached(tensor)
    root = position_of("reduce", ring, "dst", dst)
    return Task(ring.reduce(x, x, root=root, op=reduction("reduce", op), **mode))


def reduce_scatter(
    tensor: Tensor,
    tensor_or_tensor_list: Tensor | list[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """Fill ``tensor`` of rank r with the r-th part of the reduction over the group.

    Args:
        tensor: The output.
        tensor_or_tensor_list: The input: a tensor with ``size`` times the elements, or a list of
            ``size`` tensors of the output's shape.
        op: The reduction.
        group, sync_op, use_calc_stream: See ``stream``.

    Returns:
        The task.

    Raises:
        CommError: As ``ring.reduce_scatter``.
    """
    ring = member_ring("reduce_scatter", group)
    if ring is None:
        return None
    mode, out = stream_mode("reduce_scatter", ring, sync_op, use_calc_stream), detached(tensor)
    x = joined("reduce_scatter", ring, "tensor_list", tensor_or_tensor_list, out)
    return Task(ring.reduce_scatter(out, x, op=reduction("reduce_scatter", op), **mode))
