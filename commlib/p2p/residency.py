"""The most blocks of a kernel that waits for its peers, so that no two rings block a GPU.

A kernel that waits on all of a GPU keeps every other kernel away. Two rings on two streams could
each hold one rank's GPU and wait for the other's. No order in the program prevents that when graphs
are replayed. So at most one ring may fill a GPU, and a kernel of any other ring takes at most a
quarter of it. Up to four rings can then run at the same time: bounded kernels always fit, and the
ring that fills a GPU makes progress in what the others leave: its blocks start in order, and wait
for nothing that a block without a place has to do.

Blocks of the next kernel that wait for the end of one take places too. That kernel may be of any
size and of any ring. So only the ring that may fill a GPU lets the next kernel start early.

All this holds for one kernel per ring at a time. So the channels of a ring share one stream order:
a kernel for rows and one for an all_reduce may each take what the ring may have.
"""

from typing import Any, NamedTuple

import torch

from commlib.p2p import nvrtc
from commlib.p2p.stream_order import StreamOrder
from commlib.rendezvous.hosts import HostExchange

BOUNDED = 4  # kernels of so many rings fit on a GPU at the same time


_filled: dict[int, HostExchange] = {}  # by GPU: the ring that may fill it


class Claim(NamedTuple):
    """The right of the kernels of one ring to its GPUs, and their order.

    Attributes:
        fills: They may fill the GPUs of all members.
        order: The order of all kernels of the ring, whatever channel they work in.
    """

    fills: bool
    order: StreamOrder


def claim(hosts: HostExchange) -> Claim:
    """Return the claim of a ring: one ring at most fills the GPUs of its members.

    Every member calls it when the ring is created. All of them get the same answer.
    """
    device = hosts.identity.device.index
    free = device not in _filled
    agreed = all(row == [1] for row in hosts.exchange([int(free)]))
    if agreed:
        _filled[device] = hosts
    return Claim(agreed, StreamOrder(hosts.identity.device))


def release(hosts: HostExchange) -> None:
    """Let another ring fill the GPU; for a ring that is closed."""
    device = hosts.identity.device.index
    if _filled.get(device) is hosts:
        del _filled[device]


def grid(function: Any, device: int, threads: int, per_multiprocessor: int, fills: bool) -> int:
    """Return the blocks of a kernel whose blocks wait for each other: all of them fit at once.

    ``per_multiprocessor`` blocks fit, as the kernel's __launch_bounds__ say.
    """
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(per_multiprocessor * multiprocessors, most_blocks(function, device, threads, fills))


def most_blocks(function: Any, device: int, threads: int, fills: bool) -> int:
    """Return how many blocks of ``threads`` a kernel may have that waits for its peers."""
    if fills:
        return nvrtc.MOST_BLOCKS
    return max(1, nvrtc.resident_blocks(function, device, threads) // BOUNDED)
