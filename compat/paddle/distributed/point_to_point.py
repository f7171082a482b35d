"""Sends and receives, and those that are waited for later, alone or launched together."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commlib.compat.paddle.checks import detached
from commlib.compat.paddle.distributed import stream
from commlib.compat.paddle.distributed.groups import Group, member_ring, position_of
from commlib.compat.paddle.distributed.tasks import Task
from commlib.core.context import CommContext
from commlib.core.validation import check_peer
from commlib.errors import ArgumentError

Tensor = torch.Tensor


def send(
    tensor: Tensor, dst: int = 0, group: Group | None = None, sync_op: bool = True
) -> Task | None:
    """Send ``tensor`` to ``dst``, which calls ``recv``.

    Args:
        tensor: Any shape.
        dst: Global rank of the receiver.
        group: The group; None for the group of all ranks.
        sync_op: True makes the current stream wait for the call; False leaves that to ``wait()`` of
            the task.

    Returns:
        The task; None on a process that is not in the group.

    Raises:
        PeerError: ``dst`` is not another rank of the group.
        CommError: As ``ring.send``.
    """
    return stream.send(tensor, dst, group, sync_op)


def recv(
    tensor: Tensor, src: int = 0, group: Group | None = None, sync_op: bool = True
) -> Task | None:
    """Fill ``tensor`` with the data that ``src`` sends.

    Args:
        tensor: The output, as many bytes as ``src`` sends.
        src: Global rank of the sender.
        group: The group; None for the group of all ranks.
        sync_op: True makes the current stream wait for the call; False leaves that to ``wait()`` of
            the task.

    Returns:
        The task; None on a process that is not in the group.

    Raises:
        PeerError: ``src`` is not another rank of the group.
        CommError: As ``ring.recv``.
    """
    return stream.recv(tensor, src, group, sync_op)


def isend(tensor: Tensor, dst: int, group: Group | None = None) -> Task | None:
    """Send ``tensor`` to the global rank ``dst``; the tensor may change after ``wait()``.

    Args:
        tensor: Any shape.
        dst: Global rank of the receiver.
        group: Default: the group of all ranks.

    Returns:
        The task.

    Raises:
        PeerError: ``dst`` is not another rank of the group.
    """
    return stream.send(tensor, dst, group, sync_op=False)


def irecv(tensor: Tensor, src: int | None = None, group: Group | None = None) -> Task | None:
    """Fill ``tensor`` with what the global rank ``src`` sends; it is there after ``wait()``.

    Args:
        tensor: The output, as many bytes as ``src`` sends.
        src: Global rank of the sender. It is required, although upstream has a default.
        group: Default: the group of all ranks.

    Returns:
        The task.

    Raises:
        PeerError: ``src`` is not another rank of the group.
    """
    return stream.recv(tensor, src, group, sync_op=False)  # type: ignore[arg-type]  # None is refused


class P2POp:
    """One ``isend`` or ``irecv`` for ``batch_isend_irecv``."""

    def __init__(
        self, op: Callable[..., Any], tensor: Tensor, peer: int, group: Group | None = None
    ) -> None:
        """Describe a call.

        Args:
            op: ``isend`` or ``irecv``.
            tensor: What is sent, or what is filled.
            peer: Global rank of the other side.
            group: Default: the group of all ranks.

        Raises:
            ArgumentError: ``op`` is another function.
        """
        if op not in (isend, irecv):
            raise ArgumentError(f"P2POp: op={op!r}; expected isend or irecv of this module")
        self.op, self.tensor, self.peer, self.group = op, tensor, peer, group


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Task] | None:
    """Launch sends and receives together, so that they can't wait for each other in a circle.

    Calls of different groups are launched group by group, in the order of the list.

    Args:
        p2p_op_list: The calls; several may be to and from one peer, in one order on both sides.

    Returns:
        A task per call. None, with a warning, if this process is not in the first call's group.

    Raises:
        ArgumentError: ``p2p_op_list`` is empty or has other entries.
        PeerError: A peer is not another rank of its group. Nothing is launched.
    """
    if not p2p_op_list or not all(isinstance(one, P2POp) for one in p2p_op_list):
        raise ArgumentError(
            f"batch_isend_irecv: p2p_op_list={p2p_op_list!r}; expected a list of one P2POp or more"
        )
    if member_ring("batch_isend_irecv", p2p_op_list[0].group) is None:
        return None
    by_ring: dict[CommContext, list[tuple[int, P2POp, int]]] = {}
    for index, call in enumerate(p2p_op_list):
        ring = member_ring("batch_isend_irecv", call.group)
        if ring is not None:
            peer = position_of("batch_isend_irecv", ring, "peer", call.peer)
            check_peer(ring, "batch_isend_irecv", peer)
            by_ring.setdefault(ring, []).append((index, call, peer))
    tasks: dict[int, Task] = {}
    for ring, calls in by_ring.items():
        with ring.group(use_calc_stream=False, sync_op=False) as work:
            for _, call, peer in calls:
                run = ring.send if call.op is isend else ring.recv
                run(detached(call.tensor), peer=peer, use_calc_stream=False)
        tasks |= {index: Task(work) for index, _, _ in calls}
    return [tasks[index] for index in sorted(tasks)]
