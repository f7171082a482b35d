"""Collectives as ``paddle.distributed`` has them: on the comm stream, the current stream waits.

Roots and peers are global ranks. Tensors are written in place, outside autograd. On a process that
is not a member of the group, a call warns and returns None. ``stream`` describes every call.
"""

from collections.abc import Sequence

import torch

from commlib.compat.paddle.distributed import stream
from commlib.compat.paddle.distributed.groups import Group
from commlib.compat.paddle.distributed.reduce_op import ReduceOp
from commlib.compat.paddle.distributed.tasks import Task

Tensor = torch.Tensor


def all_reduce(
    tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: Group | None = None, sync_op: bool = True
) -> Task | None:
    """Reduce ``tensor`` over the group in place; see ``stream.all_reduce``."""
    return stream.all_reduce(tensor, op, group, sync_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group | None = None, sync_op: bool = True
) -> Task | None:
    """Gather the ``tensor`` of every rank in ``tensor_list``; see ``stream.all_gather``."""
    return stream.all_gather(tensor_list, tensor, group, sync_op)


def reduce(
    tensor: Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
) -> Task | None:
    """Reduce ``tensor`` to the global rank ``dst``, in place there; see ``stream.reduce``."""
    return stream.reduce(tensor, dst, op, group, sync_op)


def broadcast(
    tensor: Tensor, src: int, group: Group | None = None, sync_op: bool = True
) -> Task | None:
    """Fill ``tensor`` with that of the global rank ``src``; see ``stream.broadcast``."""
    return stream.broadcast(tensor, src, group, sync_op)


def scatter(
    tensor: Tensor,
    tensor_list: list[Tensor] | None = None,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
) -> Task | None:
    """Fill ``tensor`` with this rank's entry of the list of ``src``; see ``stream.scatter``."""
    return stream.scatter(tensor, tensor_list, src, group, sync_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
) -> Task | None:
    """Gather the ``tensor`` of every rank in the list of ``dst``; see ``stream.gather``."""
    return stream.gather(tensor, gather_list, dst, group, sync_op)


def reduce_scatter(
    tensor: Tensor,
    tensor_list: list[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    sync_op: bool = True,
) -> Task | None:
    """Fill ``tensor`` with this rank's entry of the reduced lists; see ``stream``."""
    return stream.reduce_scatter(tensor, tensor_list, op, group, sync_op)


def alltoall(
    in_tensor_list: Tensor | list[Tensor],
    out_tensor_list: Tensor | list[Tensor],
    group: Group | None = None,
    sync_op: bool = True,
) -> Task | None:
    """Send entry j of the input to rank j. The input is first; in ``stream`` the output is."""
    return stream.alltoall(out_tensor_list, in_tensor_list, group, sync_op)


def alltoall_single(
    in_tensor: Tensor,
    out_tensor: Tensor,
    in_split_sizes: Sequence[int] | None = None,
    out_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    sync_op: bool = True,
) -> Task | None:
    """Send rows of the input to every rank. The input is first; in ``stream`` the output is."""
    return stream.alltoall_single(
        out_tensor, in_tensor, out_split_sizes, in_split_sizes, group, sync_op
    )


def send(
    tensor: Tensor, dst: int = 0, group: Group | None = None, sync_op: bool = True
) -> Task | None:
    """Send ``tensor`` to the global rank ``dst``; see ``stream.send``."""
    return stream.send(tensor, dst, group, sync_op)


def recv(
    tensor: Tensor, src: int = 0, group: Group | None = None, sync_op: bool = True
) -> Task | None:
    """Fill ``tensor`` with what the global rank ``src`` sends; see ``stream.recv``."""
    return stream.recv(tensor, src, group, sync_op)
