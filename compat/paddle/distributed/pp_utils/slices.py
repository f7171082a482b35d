"""Slices of tensors between pipeline stages, alone or launched together.

Peers are global ranks. A tensor that every tensor-parallel rank has whole is sent in slices: each
of the ``nranks`` ranks sends its own one, and ``allgather_partial`` completes the tensor on the
other side. A tensor whose elements ``nranks`` does not divide is sent whole.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commlib.compat.paddle.checks import ring_of
from commlib.compat.paddle.distributed import stream
from commlib.compat.paddle.distributed.groups import Group, global_group, member_ring, position_of
from commlib.compat.paddle.distributed.hybrid_group import HybridCommunicateGroup
from commlib.compat.paddle.distributed.tasks import Task
from commlib.errors import ArgumentError, ShapeError

Tensor = torch.Tensor


class _Pipeline:
    """The settings of ``initialize_p2p_groups``."""

    slices = True


def initialize_p2p_groups(
    hcg: HybridCommunicateGroup, enable_partial_send_recv: bool = True, enable_timer: bool = False
) -> None:
    """Choose whether tensors are sent in slices.

    Args:
        hcg: Ignored: every function here takes its group.
        enable_partial_send_recv: False sends every tensor whole.
        enable_timer: Ignored.
    """
    _Pipeline.slices = enable_partial_send_recv


def send_partial(
    tensor: Tensor,
    dst: int = 0,
    nranks: int = 1,
    rank_id: int = 0,
    group: Group | None = None,
    use_calc_stream: bool = True,
) -> Task | None:
    """Send slice ``rank_id`` of ``nranks`` of ``tensor`` to ``dst``.

    Args:
        tensor: Any shape with elements.
        dst: Global rank of the receiver.
        nranks: Number of slices, the tensor-parallel degree.
        rank_id: Index of the slice, this process's tensor-parallel rank.
        group: Default: the group of all ranks. Other processes get None, with a warning.
        use_calc_stream: True runs on the current stream; False on the group's comm stream, and the
            caller waits for the task.

    Returns:
        The task.

    Raises:
        PeerError: ``dst`` is not another rank of the group.
        ShapeError: ``tensor`` has no elements.
    """
    ring = member_ring("send_partial", group)
    if ring is None:
        return None
    group = global_group() if group is None else group
    if not _in_slices("send_partial", tensor, nranks):
        return stream.send(tensor, dst, group, use_calc_stream, use_calc_stream)
    peer = position_of("send_partial", ring, "dst", dst)
    if use_calc_stream:
        return group.process_group.send_partial_on_calc_stream(tensor, peer, nranks, rank_id)
    return group.process_group.send_partial(tensor, peer, nranks, rank_id, sync_op=False)


def recv_partial(
    tensor: Tensor,
    src: int = 0,
    nranks: int = 1,
    rank_id: int = 0,
    group: Group | None = None,
    use_calc_stream: bool = True,
) -> Task | None:
    """Fill slice ``rank_id`` of ``nranks`` of ``tensor`` with what ``src`` sends.

    Args:
        tensor: The output. Its other slices keep their values.
        src: Global rank of the sender.
        nranks, rank_id, group, use_calc_stream: As in ``send_partial``.

    Returns:
        The task.

    Raises:
        PeerError: ``src`` is not another rank of the group.
        ShapeError: ``tensor`` has no elements.
    """
    ring = member_ring("recv_partial", group)
    if ring is None:
        return None
    group = global_group() if group is None else group
    if not _in_slices("recv_partial", tensor, nranks):
        return stream.recv(tensor, src, group, use_calc_stream, use_calc_stream)
    peer = position_of("recv_partial", ring, "src", src)
    if use_calc_stream:
        return group.process_group.recv_partial_on_calc_stream(tensor, peer, nranks, rank_id)
    return group.process_group.recv_partial(tensor, peer, nranks, rank_id, sync_op=False)


def allgather_partial(
    tensor: Tensor,
    nranks: int = 1,
    rank_id: int = 0,
    group: Group | None = None,
    use_calc_stream: bool = True,
) -> Tensor | Task | None:
    """Fill slice r of ``tensor`` from rank r of the tensor-parallel group, in place.

    Args:
        tensor: What ``recv_partial`` has received this process's slice of.
        nranks: Number of slices, the size of the group.
        rank_id: This process's position in the group.
        group: The tensor-parallel group. Default: the group of all ranks.
        use_calc_stream: As in ``send_partial``.

    Returns:
        The task; ``tensor`` itself if it was sent whole; None, with a warning, on a process that is
        not in the group.

    Raises:
        ArgumentError: ``nranks`` or ``rank_id`` differs from the group's.
        ShapeError: ``tensor`` has no elements.
    """
    if not _in_slices("allgather_partial", tensor, nranks):
        return tensor
    if member_ring("allgather_partial", group) is None:
        return None
    pg = (global_group() if group is None else group).process_group
    if use_calc_stream:
        return pg.all_gather_partial_on_calc_stream(tensor, tensor, nranks, rank_id)
    return pg.all_gather_partial(tensor, tensor, nranks, rank_id, sync_op=False)


all_gather_partial = allgather_partial  # as the methods of process groups are named


def _send_on_calc_stream(
    tensor: Tensor, group: Group, dst: int, nranks: int = 1, rank_id: int = 0
) -> Task | None:
    """Send ``tensor``, or its slice, on the current stream; see ``send_partial``."""
    return send_partial(tensor, dst, nranks, rank_id, group)


def _recv_on_calc_stream(
    tensor: Tensor, group: Group, src: int, nranks: int = 1, rank_id: int = 0
) -> Task | None:
    """Receive ``tensor``, or its slice, on the current stream; see ``recv_partial``."""
    return recv_partial(tensor, src, nranks, rank_id, group)


class P2PonCalcStream:
    """One send or receive for ``batch_send_recv_on_calc_stream``."""

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int,
        group: Group | None,
        nranks: int = 1,
        rank_id: int = 0,
    ) -> None:
        """Describe a call.

        Args:
            op: ``_send_on_calc_stream`` or ``_recv_on_calc_stream``.
            tensor: What is sent, or what is filled.
            peer: Global rank of the other side.
            group, nranks, rank_id: As in ``send_partial``.

        Raises:
            ArgumentError: ``op`` is another function.
        """
        if op not in (_send_on_calc_stream, _recv_on_calc_stream):
            raise ArgumentError(
                f"P2PonCalcStream: op={op!r}; expected _send_on_calc_stream or "
                f"_recv_on_calc_stream of this module"
            )
        self.op, self.tensor, self.peer, self.group = op, tensor, peer, group
        self.nranks, self.rank_id = nranks, rank_id


def batch_send_recv_on_calc_stream(p2p_op_list: Sequence[P2PonCalcStream]) -> None:
    """Launch sends and receives of one group together, on the current stream.

    Args:
        p2p_op_list: The calls.

    Raises:
        ArgumentError: ``p2p_op_list`` is empty or has other entries, or several groups, which would
            wait for each other on one stream.
        RingError: This process is not in the group.
        PeerError: A peer is not another rank of the group. Nothing is launched.
    """
    if not p2p_op_list or not all(isinstance(one, P2PonCalcStream) for one in p2p_op_list):
        raise ArgumentError(
            f"batch_send_recv_on_calc_stream: p2p_op_list={p2p_op_list!r}; expected a list of one "
            f"P2PonCalcStream or more"
        )
    rings = list(dict.fromkeys(0 if one.group is None else one.group.id for one in p2p_op_list))
    if len(rings) > 1:
        raise ArgumentError(
            f"batch_send_recv_on_calc_stream: calls of rings {rings}; expected one group; use "
            f"batch_isend_irecv for several"
        )
    with ring_of("batch_send_recv_on_calc_stream", rings[0]).group():
        for one in p2p_op_list:
            one.op(one.tensor, one.group, one.peer, one.nranks, one.rank_id)


def _in_slices(name: str, tensor: Tensor, nranks: int) -> bool:
    """Return True if ``tensor`` is sent in slices."""
    if not tensor.numel():
        raise ShapeError(
            f"{name}: tensor has shape {tuple(tensor.shape)}; expected one element or more"
        )
    return _Pipeline.slices and nranks > 1 and tensor.numel() % nranks == 0
