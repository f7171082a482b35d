"""A gloo group of a ring's hosts: whole numbers from every rank to every rank, and its end."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_BLOCK = 64  # numbers in the first message: the length, and as many values as fit
_TAG = 1  # the group of a CPU ring carries the ring's own sends too, with tag 0


def connect(store: dist.Store, rank: int, size: int, wait: timedelta) -> Any:
    """Return a gloo group outside torch's registry; blocks until all members have connected."""
    return dist.ProcessGroupGloo(store, rank, size, wait)


def release(group: list[Any]) -> None:
    """Give up the process group in the one-element list ``group``, its only reference.

    Blocks until the calls that are under way have ended, up to their own timeout.
    """
    group[0].abort()
    group.clear()


def all_gather(group: Any, rank: int, size: int, values: Sequence[int]) -> list[list[int]]:
    """Return every rank's whole numbers, in rank order; lengths may differ.

    One message a rank for up to 63 numbers, two for more. Blocks at most the group's timeout.
    """
    longest = _BLOCK - 1
    first = _gathered(group, rank, size, [len(values), *values[:longest]], _BLOCK)
    lengths = [row[0] for row in first]
    rows = [row[1:] for row in first]
    if max(lengths) > longest:
        more = _gathered(group, rank, size, list(values[longest:]), max(lengths) - longest)
        rows = [row + rest for row, rest in zip(rows, more, strict=True)]
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _gathered(group: Any, rank: int, size: int, values: list[int], width: int) -> list[list[int]]:
    """Everybody sends to everybody: one hop, where gloo's all-gather takes ``size`` of them."""
    every = torch.zeros((size, width), dtype=torch.int64, device="cpu")
    every[rank, : len(values)] = torch.tensor(values, dtype=torch.int64, device="cpu")
    rows = every.unbind()
    peers = [peer for peer in range(size) if peer != rank]
    under_way = [group.recv([rows[peer]], peer, _TAG) for peer in peers]
    under_way += [group.send([rows[rank]], peer, _TAG) for peer in peers]
    for work in under_way:
        work.wait()
    numbers: list[list[int]] = every.tolist()
    return numbers
