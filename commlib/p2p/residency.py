"""How many blocks a kernel that waits for its peers may have, so that no two rings block a GPU.

A kernel that waits on all of a GPU keeps every other kernel away. Two rings on two streams could
each hold one rank's GPU and wait for the other's. No order in the program prevents that when graphs
are replayed. So at most one ring may fill a GPU, and a kernel of any other ring takes at most a
quarter of it. Up to four rings can then run at the same time: bounded kernels always fit, and the
ring that fills a GPU makes progress in what the others leave.
"""

from typing import Any

from commlib.core.ring import Ring
from commlib.p2p import nvrtc

BOUNDED = 4  # kernels of so many rings fit on a GPU at the same time


_filled: dict[int, Ring] = {}  # by GPU: the ring that may fill it


def claim(ring: Ring) -> bool:
    """Return True if the kernels of this ring may fill the GPUs of all its members.

    Every member calls it when the ring is created. All of them get the same answer.
    """
    free = ring.device.index not in _filled
    agreed = all(row == [1] for row in ring.exchange([int(free)]))
    if agreed:
        _filled[ring.device.index] = ring
    return agreed


def release(ring: Ring) -> None:
    """Let another ring fill the GPU; for a ring that is closed."""
    if _filled.get(ring.device.index) is ring:
        del _filled[ring.device.index]


def most_blocks(function: Any, device: int, threads: int, fills: bool) -> int:
    """Return how many blocks of ``threads`` a kernel may have that waits for its peers."""
    if fills:
        return nvrtc.MOST_BLOCKS
    return max(1, nvrtc.resident_blocks(function, device, threads) // BOUNDED)
