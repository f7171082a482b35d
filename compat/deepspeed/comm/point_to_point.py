"""Sends, receives and barriers of ``deepspeed.comm``."""

from datetime import timedelta

import torch
from torch.distributed import Work

from commlib.compat import torch_distributed as dist
from commlib.compat.deepspeed.comm.counters import counters

Tensor = torch.Tensor
Group = dist.ProcessGroup | None


def send(
    tensor: Tensor,
    dst: int,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "send",
    debug: object = None,
) -> None:
    """Send ``tensor`` to rank ``dst``.

    Args:
        tensor: Any shape.
        dst: Rank of the receiver.
        group, tag, prof, log_name, debug: See ``deepspeed.comm``. ``tag`` is ignored on GPUs.
    """
    counters.count(log_name, [tensor], prof)
    dist.send(tensor, dst, group=group, tag=tag)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "recv",
    debug: object = None,
) -> int:
    """Receive ``tensor`` from rank ``src``.

    Args:
        tensor: The output.
        src: Rank of the sender. Rings need one: None is an error.
        group, tag, prof, log_name, debug: See ``deepspeed.comm``. ``tag`` is ignored on GPUs.

    Returns:
        The sender's rank.
    """
    counters.count(log_name, [tensor], prof)
    return int(dist.recv(tensor, src, group=group, tag=tag))


def isend(
    tensor: Tensor,
    dst: int,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "isend",
    debug: object = None,
) -> Work | None:
    """Start to send ``tensor`` to rank ``dst``.

    Args:
        tensor: Any shape.
        dst: Rank of the receiver.
        group, tag, prof, log_name, debug: See ``deepspeed.comm``. ``tag`` is ignored on GPUs.

    Returns:
        The work to wait for; None on a rank that is not in the group.
    """
    counters.count(log_name, [tensor], prof)
    return dist.isend(tensor, dst, group=group, tag=tag)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "irecv",
    debug: object = None,
) -> Work | None:
    """Start to receive ``tensor`` from rank ``src``.

    Args:
        tensor: The output.
        src: Rank of the sender. Rings need one: None is an error.
        group, tag, prof, log_name, debug: See ``deepspeed.comm``. ``tag`` is ignored on GPUs.

    Returns:
        The work to wait for; None on a rank that is not in the group.
    """
    counters.count(log_name, [tensor], prof)
    return dist.irecv(tensor, src, group=group, tag=tag)


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: object = None,
) -> Work | None:
    """Wait for every rank of the group.

    Args:
        group, async_op, prof, log_name, debug: See ``deepspeed.comm``.
        device_ids: As in ``torch.distributed.barrier``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    counters.count(log_name, [], prof)
    work: Work | None = dist.barrier(group=group, async_op=async_op, device_ids=device_ids)
    return work


def monitored_barrier(
    group: Group = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof: bool = False,
    log_name: str = "monitored_barrier",
    debug: object = None,
) -> None:
    """Wait on the host for every rank of the group; the error names late ranks.

    Args:
        group, prof, log_name, debug: See ``deepspeed.comm``.
        timeout: The longest wait. Default: that of the group.
        wait_all_ranks: True names all late ranks, not only the first one.
    """
    counters.count(log_name, [], prof)
    dist.monitored_barrier(group, timeout, wait_all_ranks)
