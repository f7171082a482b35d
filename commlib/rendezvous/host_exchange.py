"""The host exchange: all-gather of integers over a gloo group, and the group's set-up and end."""

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
from commlib.rendezvous.store import EngineStore
from commlib.waits import PointToPoint

_CUT_TAG = 2  # nobody sends with this tag
_SHORTEST = timedelta(milliseconds=1)
_LOOPBACK = "127.0.0.1"
_TAG = 1  # the group of a CPU ring also carries the ring's sends, with tag 0
USER_TAGS = 1 << 28  # the program's own tags begin here; those below belong to the ring


def connect(
    store: EngineStore, rank: int, size: int, wait: timedelta, one_network: bool = False
) -> Any:
    """Return a gloo group outside torch's registry; blocks until all members have connected.

    Args:
        store: The store for the members' addresses.
        rank: This member's position in the ring.
        size: The number of members.
        wait: The timeout of the group's calls.
        one_network: True if all members share one loopback interface, the only one gloo then uses.
    """
    c10d_store = store.for_connecting()
    if one_network:
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack the class of its options
        options = gloo._Options()
        options._timeout = wait
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        return dist.ProcessGroupGloo(c10d_store, rank, size, options)
    return dist.ProcessGroupGloo(c10d_store, rank, size, wait)


def address(rank: int) -> str:
    """Return gloo's key for the address of a member: the first device, then the member.

    It is deleted after every member has connected: gloo crashes where it finds no value.
    """
    return f"0/{rank}"


def cut(group: Any) -> None:
    """End all calls of a gloo group that are in progress, on this rank and soon on its peers.

    With ``abort()`` of torch such calls, and threads that wait for them, last until their deadline.
    A wait that times out makes gloo close the connections, so that all calls on them fail at once.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.zeros(1, device="cpu")], peer, _CUT_TAG).wait(_SHORTEST)


def release(group: list[Any]) -> None:
    """Free the process group in the one-element list ``group``, its only reference.

    Blocks until the calls in progress have ended, up to their own timeout.
    """
    group[0].abort()
    group.clear()


def whole_numbers(values: Sequence[int]) -> list[int]:
    """Return ``values`` as a list of ints.

    Raises:
        ArgumentError: ``values`` is not a sequence of integers of 64 bits.
    """
    if isinstance(values, (str, bytes, bytearray, dict)) or not hasattr(values, "__getitem__"):
        raise ArgumentError(
            f"values is {type(values).__name__}; expected a list of integers; "
            f"pass list(data) for bytes"
        )
    try:
        numbers = list(map(index, values))
    except (TypeError, KeyError) as error:
        raise ArgumentError(f"values={values!r:.80}: {error}; expected integers") from None
    if numbers and (min(numbers) < -(2**63) or max(numbers) >= 2**63):
        wrong = next(number for number in numbers if not -(2**63) <= number < 2**63)
        raise ArgumentError(
            f"values contains {wrong}; expected integers of 64 bits, -2**63 to 2**63 - 1"
        )
    return numbers


def all_gather(rounds: Rounds, values: Sequence[int]) -> list[list[int]]:
    """Return every rank's integers, in rank order; lengths may differ.

    One call of ``rounds`` carries up to 509 integers, and each further call 510 more.
    """
    first = rounds([len(values), *values[: MOST - 1]])
    lengths = [row[0] for row in first]
    rows = [row[1:] for row in first]
    for start in range(MOST - 1, max(lengths), MOST):
        more = rounds(list(values[start : start + MOST]))
        for row, rest in zip(rows, more, strict=True):
            row += rest  # in place: a copy per round would make long rows quadratic
    return rows


def gloo_round(group: Any, rank: int, size: int, values: list[int]) -> list[list[int]]:
    """Exchange integers with all peers in one hop; gloo's all-gather takes ``size`` hops."""
    every = torch.zeros((size, 1 + MOST), dtype=torch.int64, device="cpu")
    every[rank, : 1 + len(values)] = torch.tensor([len(values), *values], device="cpu")
    rows = every.unbind()
    peers = [peer for peer in range(size) if peer != rank]
    works = [group.recv([rows[peer]], peer, _TAG) for peer in peers]
    works += [group.send([rows[rank]], peer, _TAG) for peer in peers]
    PointToPoint(works).wait()
    return [row[1 : 1 + row[0]] for row in every.tolist()]


def host_number() -> int:
    """Return a number that two processes share if they run on one host."""
    return _number(_host())


def network_number() -> int:
    """Return a number that two processes share if they have one loopback interface."""
    return _number(f"{_host()} {_NETWORK.stat().st_ino}")


_NETWORK = Path("/proc/self/ns/net")


def _host() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text() + socket.gethostname()


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
