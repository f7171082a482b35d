"""Sends, receives and barriers of ``deepspeed.comm``."""

from datetime import timedelta
from typing import Any

import torch

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
    """Send ``tensor`` to rank ``dst``."""
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
    """Receive ``tensor`` from rank ``src``; returns that rank."""
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
) -> Any:
    """Send ``tensor`` to rank ``dst``; returns what to wait for."""
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
) -> Any:
    """Receive ``tensor`` from rank ``src``; returns what to wait for."""
    counters.count(log_name, [tensor], prof)
    return dist.irecv(tensor, src, group=group, tag=tag)


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: object = None,
) -> Any:
    """Wait for every rank of the group."""
    counters.count(log_name, [], prof)
    return dist.barrier(group=group, async_op=async_op, device_ids=device_ids)


def monitored_barrier(
    group: Group = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof: bool = False,
    log_name: str = "monitored_barrier",
    debug: object = None,
) -> None:
    """Wait on the host for every rank of the group; the error names late ranks."""
    counters.count(log_name, [], prof)
    dist.monitored_barrier(group, timeout, wait_all_ranks)
