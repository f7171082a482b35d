"""A gloo group of a ring's hosts: integers from every rank to every rank, and its end."""

import hashlib
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from operator import index
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commlib.errors import ArgumentError
from commlib.rendezvous.shared_memory import MOST, Rounds
from commlib.rendezvous.store import BoundedStore, EngineStore
from commlib.waits import PointToPoint

_CUT = 2  # the tag of a receive without a sender
_AT_ONCE = timedelta(milliseconds=1)
_LOOPBACK = "127.0.0.1"
_TAG = 1  # the group of a CPU ring carries the ring's own sends too, with tag 0


def connect(
    store: EngineStore, rank: int, size: int, wait: timedelta, one_network: bool = False
) -> Any:
    """Return a gloo group outside torch's registry; blocks until all members have connected.

    Args:
        store: where the members find each other's addresses.
        rank: this member's position.
        size: how many members there are.
        wait: the time limit of the group's calls.
        one_network: all members share one loopback interface, so that gloo listens there alone.
    """
    found = store.for_connecting()
    if one_network:
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack the class of its options
        options = gloo._Options()
        options._timeout = wait
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        return dist.ProcessGroupGloo(found, rank, size, options)
    return dist.ProcessGroupGloo(found, rank, size, wait)


def delete_address(store: BoundedStore, rank: int) -> None:
    """Delete this rank's address, some time later; every member has connected."""
    store.delete([f"0/{rank}"])  # gloo's key: the first device, then the member


def cut(group: Any) -> None:
    """End every call of a gloo group that is under way, on this rank and soon on its peers.

    ``abort()`` of torch leaves such calls, and threads that wait for them, to their deadline. But
    a wait that times out makes gloo close the connections, and all calls on them fail at once.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.zeros(1, device="cpu")], peer, _CUT).wait(_AT_ONCE)


def release(group: list[Any]) -> None:
    """Give up the process group in the one-element list ``group``, its only reference.

    Blocks until the calls that are under way have ended, up to their own timeout.
    """
    group[0].abort()
    group.clear()


def whole_numbers(values: Sequence[int]) -> list[int]:
    """Return ``values`` as a list of ints.

    Raises:
        ArgumentError: It is not a sequence, or holds what is not a whole number of 64 bits.
    """
    if isinstance(values, (str, bytes, bytearray, dict)) or not hasattr(values, "__getitem__"):
        raise ArgumentError(
            f"values is {type(values).__name__}; expected a list of whole numbers; "
            f"call exchange_bytes() for bytes"
        )
    try:
        numbers = list(map(index, values))
    except (TypeError, KeyError) as error:
        raise ArgumentError(f"values={values!r:.80}: {error}; expected whole numbers") from None
    if numbers and (min(numbers) < -(2**63) or max(numbers) >= 2**63):
        wrong = next(number for number in numbers if not -(2**63) <= number < 2**63)
        raise ArgumentError(
            f"values contains {wrong}; expected numbers of 64 bits, -2**63 to 2**63 - 1"
        )
    return numbers


def all_gather(rounds: Rounds, values: Sequence[int]) -> list[list[int]]:
    """Return every rank's whole numbers, in rank order; lengths may differ.

    One round for up to 509 numbers, and one more for each further 510.
    """
    first = rounds([len(values), *values[: MOST - 1]])
    lengths = [row[0] for row in first]
    rows = [row[1:] for row in first]
    for start in range(MOST - 1, max(lengths), MOST):
        more = rounds(list(values[start : start + MOST]))
        rows = [row + rest for row, rest in zip(rows, more, strict=True)]
    return rows


def gloo_round(group: Any, rank: int, size: int, values: list[int]) -> list[list[int]]:
    """Everybody sends to everybody: one hop, where gloo's all-gather takes ``size`` of them."""
    every = torch.zeros((size, 1 + MOST), dtype=torch.int64, device="cpu")
    every[rank, : 1 + len(values)] = torch.tensor([len(values), *values], device="cpu")
    rows = every.unbind()
    peers = [peer for peer in range(size) if peer != rank]
    under_way = [group.recv([rows[peer]], peer, _TAG) for peer in peers]
    under_way += [group.send([rows[rank]], peer, _TAG) for peer in peers]
    PointToPoint(under_way).wait()
    return [row[1 : 1 + row[0]] for row in every.tolist()]


def host_number() -> int:
    """A number that two processes share if they run on one host."""
    return _number(_host())


def network_number() -> int:
    """Return a number that two processes share if they have one loopback interface."""
    return _number(f"{_host()} {_NETWORK.stat().st_ino}")


_NETWORK = Path("/proc/self/ns/net")


def _host() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text() + socket.gethostname()


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
