"""Collectives that copy, with a choice of the stream."""

import torch

from commlib.compat.paddle.checks import detached
from commlib.compat.paddle.distributed.groups import Group, member_ring, position_of
from commlib.compat.paddle.distributed.stream.mode import stream_mode
from commlib.compat.paddle.distributed.tasks import Task
from commlib.compat.paddle.distributed.tensor_lists import delivery, joined, parts_for
from commlib.errors import RingError

Tensor = torch.Tensor
TensorOrList = Tensor | list[Tensor]


def all_gather(
    tensor_or_tensor_list: TensorOrList,
    tensor: Tensor,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """Gather the ``tensor`` of every rank, on every rank.

    Args:
        tensor_or_tensor_list: The output: a tensor with ``size`` times the elements, an empty list,
            or a list of ``size`` tensors of the input's shape.
        tensor: Any shape, the same on every rank.
        group, sync_op, use_calc_stream: See ``stream``.

    Returns:
        The task. With ``sync_op=False`` a list of the caller's tensors is filled by ``wait()``.

    Raises:
        RingError: This process is not a member of the group.
        CommError: As ``ring.all_gather``.
    """
    if group is not None and group.rank < 0:
        raise RingError(
            f"all_gather: this rank is not in group {group.id} (ranks {group.ranks}); expected a "
            f"call on its members alone"
        )
    ring = member_ring("all_gather", group)
    assert ring is not None  # other processes got the error above
    mode, x = stream_mode("all_gather", ring, sync_op, use_calc_stream), detached(tensor)
    if isinstance(tensor_or_tensor_list, Tensor):
        return Task(ring.all_gather(detached(tensor_or_tensor_list), x, **mode))
    outputs = tensor_or_tensor_list
    gathered = parts_for("all_gather", ring, "tensor_list", outputs, x)
    done = ring.all_gather(gathered, x, **mode)
    return Task(done, delivery(outputs, gathered.unbind(0)))


def broadcast(
    tensor: Tensor,
    src: int,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """Fill ``tensor`` of every rank with that of ``src``.

    Args:
        tensor: Any shape, the same on every rank. Input on ``src``, output elsewhere.
        src: Global rank of the sender.
        group, sync_op, use_calc_stream: See ``stream``.

    Returns:
        The task.

    Raises:
        PeerError: ``src`` is not in the group.
        CommError: As ``ring.broadcast``.
    """
    ring = member_ring("broadcast", group)
    if ring is None:
        return None
    mode, x = stream_mode("broadcast", ring, sync_op, use_calc_stream), detached(tensor)
    root = position_of("broadcast", ring, "src", src)
    return Task(ring.broadcast(x, x, root=root, **mode))


def scatter(
    tensor: Tensor,
    tensor_or_tensor_list: TensorOrList | None = None,
    src: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """Fill ``tensor`` of rank r with the r-th part of the input of ``src``.

    Args:
        tensor: The output.
        tensor_or_tensor_list: The input on ``src``, as in ``reduce_scatter``; ignored elsewhere.
        src: Global rank of the sender.
        group, sync_op, use_calc_stream: See ``stream``.

    Returns:
        The task.

    Raises:
        PeerError: ``src`` is not in the group.
        ArgumentError: There is no input on ``src``.
        CommError: As ``ring.scatter``.
    """
    ring = member_ring("scatter", group)
    if ring is None:
        return None
    mode, out = stream_mode("scatter", ring, sync_op, use_calc_stream), detached(tensor)
    root, x = position_of("scatter", ring, "src", src), None
    if ring.rank == root:
        inputs: TensorOrList = [] if tensor_or_tensor_list is None else tensor_or_tensor_list
        x = joined("scatter", ring, "tensor_list", inputs, out)
    return Task(ring.scatter(out, x, root=root, **mode))


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Group | None = None,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Task | None:
    """Gather the ``tensor`` of every rank on ``dst``.

    Args:
        tensor: Any shape, the same on every rank.
        gather_list: The output on ``dst``, an empty list or one of ``size`` tensors of the input's
            shape; ignored elsewhere.
        dst: Global rank of the receiver.
        group, sync_op, use_calc_stream: See ``stream``.

    Returns:
        The task. With ``sync_op=False`` a list of the caller's tensors is filled by ``wait()``.

    Raises:
        PeerError: ``dst`` is not in the group.
        ArgumentError: There is no list on ``dst``.
        CommError: As ``ring.gather``.
    """
    ring = member_ring("gather", group)
    if ring is None:
        return None
    mode, x = stream_mode("gather", ring, sync_op, use_calc_stream), detached(tensor)
    root = position_of("gather", ring, "dst", dst)
    if ring.rank != root:
        return Task(ring.gather(None, x, root=root, **mode))
    outputs: list[Tensor] = gather_list  # type: ignore[assignment]  # None is refused below
    gathered = parts_for("gather", ring, "gather_list", outputs, x)
    done = ring.gather(gathered, x, root=root, **mode)
    return Task(done, delivery(outputs, gathered.unbind(0)))
