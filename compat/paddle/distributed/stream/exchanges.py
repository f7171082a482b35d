"""Exchanges between pairs of ranks, with a choice of the stream."""

from collections.abc import Sequence

import torch

from commlib.compat.paddle.checks import detached
from commlib.compat.paddle.distributed.groups import Group, member_ring, position_of
from commlib.compat.paddle.distributed.stream.mode import stream_mode
from commlib.compat.paddle.distributed.tasks import Task
from commlib.compat.paddle.distributed.tensor_lists import check_list, delivery
from commlib.errors import ArgumentError

Tensor = torch.Tensor
TensorOrList = Tensor | list[Tensor]


def alltoall(
    out_tensor_or_tensor_list: TensorOrList,
    in_tensor_or_tensor_list: TensorOrList,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """Send part j of the input to rank j; the output has the received parts in rank order.

    The output is first here in every release; ``paddle.distributed.alltoall`` has its order by
    ``FLAGS_comm_paddle_version``.

    Args:
        out_tensor_or_tensor_list: The output: a tensor; or an empty list, which gets tensors of the
            input's shapes; or a list of ``size`` tensors.
        in_tensor_or_tensor_list: The input: a tensor of ``size`` equal parts along dim 0, or a list
            of ``size`` tensors, which may differ in shape.
        group, sync_op, use_calc_stream: See ``stream``.

    Returns:
        The task. With ``sync_op=False`` a list of the caller's tensors is filled by ``wait()``.

    Raises:
        ArgumentError: One of both is a tensor and the other one is a list.
        CommError: As ``ring.all_to_all``.
    """
    ring = member_ring("alltoall", group)
    if ring is None:
        return None
    mode = stream_mode("alltoall", ring, sync_op, use_calc_stream)
    outputs, inputs = out_tensor_or_tensor_list, in_tensor_or_tensor_list
    if isinstance(outputs, Tensor) and isinstance(inputs, Tensor):
        return Task(ring.all_to_all(detached(outputs), detached(inputs), **mode))
    if isinstance(outputs, Tensor) or isinstance(inputs, Tensor):
        raise ArgumentError(
            f"{ring._describe('alltoall')}: the output is {type(outputs).__name__} and the input "
            f"is {type(inputs).__name__}; pass two tensors or two lists"
        )
    check_list("alltoall", ring, "in_tensor_list", inputs)
    shapes = inputs if outputs == [] else outputs
    check_list("alltoall", ring, "out_tensor_list", shapes)
    x = torch.cat([one.detach().reshape(-1) for one in inputs])
    takes, sends = [one.numel() for one in shapes], [one.numel() for one in inputs]
    recv = x.new_empty(sum(takes))
    done = ring.all_to_all(recv, x, out_splits=takes, in_splits=sends, **mode)
    parts = [part.view(one.shape) for part, one in zip(recv.split(takes), shapes, strict=True)]
    return Task(done, delivery(outputs, parts))


def alltoall_single(
    out_tensor: Tensor,
    in_tensor: Tensor,
    out_split_sizes: Sequence[int] | None = None,
    in_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """Send rows of the input to every rank; the output has the received rows in rank order.

    The output is first here in every release; ``paddle.distributed.alltoall_single`` has its order
    by ``FLAGS_comm_paddle_version``.

    Args:
        out_tensor: The output, rows along dim 0.
        in_tensor: The input, rows along dim 0.
        out_split_sizes: Rows from each rank. Default, also for an empty list: equal parts.
        in_split_sizes: Rows to each rank, likewise. All ranks pass sizes, or none does.
        group, sync_op, use_calc_stream: See ``stream``.

    Returns:
        The task.

    Raises:
        ShapeError: Sizes do not add up to the rows.
        CommError: As ``ring.all_to_all``.
    """
    ring = member_ring("alltoall_single", group)
    if ring is None:
        return None
    mode = stream_mode("alltoall_single", ring, sync_op, use_calc_stream)
    out, x = detached(out_tensor), detached(in_tensor)
    sizes = out_split_sizes, in_split_sizes
    takes, sends = (None if each is None or not len(each) else each for each in sizes)
    return Task(ring.all_to_all(out, x, out_splits=takes, in_splits=sends, **mode))


def send(
    tensor: Tensor,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """Send ``tensor`` to ``dst``, which calls ``recv``.

    Args:
        tensor: Any shape.
        dst: Global rank of the receiver.
        group, sync_op, use_calc_stream: See ``stream``.

    Returns:
        The task.

    Raises:
        PeerError: ``dst`` is not another rank of the group.
        CommError: As ``ring.send``.
    """
    ring = member_ring("send", group)
    if ring is None:
        return None
    mode = stream_mode("send", ring, sync_op, use_calc_stream)
    return Task(ring.send(detached(tensor), peer=position_of("send", ring, "dst", dst), **mode))


def recv(
    tensor: Tensor,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """Fill ``tensor`` with what ``src`` sends.

    Args:
        tensor: The output, as many bytes as ``src`` sends.
        src: Global rank of the sender.
        group, sync_op, use_calc_stream: See ``stream``.

    Returns:
        The task.

    Raises:
        PeerError: ``src`` is not another rank of the group.
        CommError: As ``ring.recv``.
    """
    ring = member_ring("recv", group)
    if ring is None:
        return None
    mode = stream_mode("recv", ring, sync_op, use_calc_stream)
    return Task(ring.recv(detached(tensor), peer=position_of("recv", ring, "src", src), **mode))
