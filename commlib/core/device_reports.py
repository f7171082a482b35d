"""Errors that a device finds while a call runs: a check of the ring raises them later."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from commlib.errors import ArgumentError, CapacityError, CommError
from commlib.p2p.channel import ExpertKernels
from commlib.p2p.experts.tables import Overflow
from commlib.rendezvous.identity import RingIdentity
from commlib.streams import capturing

Tensor = torch.Tensor

_LATER = (
    "the device has reported it after the call, so ranks may raise it in different calls; to go "
    "on, call torch.cuda.synchronize() and ring.check() at the same place on every rank"
)
Describe = Callable[[RingIdentity, list[int]], CommError]


class DeviceReports:
    """Reports of the calls of one ring: wrong counts, and experts without room.

    A report does not break the ring. It is raised once, on every rank that looks.
    """

    def __init__(self, identity: RingIdentity) -> None:
        self._identity = identity
        self._kernels: ExpertKernels | None = None
        self._records: dict[Any, Record] = {}
        self._pending: CommError | None = None  # read, but not raised yet

    def watch(self, kernels: ExpertKernels) -> None:
        """Ask these kernels from now on, instead of those of a channel that was freed."""
        if kernels is not self._kernels:
            self._look()
            self._kernels = kernels

    def note(self, collective: str, found: Tensor, describe: Describe) -> None:
        """Report what a call has found; never blocks on a GPU.

        Called unwatched: a graph neither restores nor compares the memory of reports.

        Args:
            collective: The call.
            found: int64: 1 for an error or 0, and the numbers that describe it.
            describe: Returns the error; the same function for all calls of ``collective``.

        Raises:
            CommError: On a CPU, where the numbers are known.
            ArgumentError: The first call is in a capture.
        """
        if found.device.type == "cpu":
            if found[0]:
                raise describe(self._identity, found[1:].tolist())
            return
        key = collective, len(found)
        if key not in self._records:
            if capturing():
                raise ArgumentError(
                    f"{self._identity.describe(collective)}: the first such call of the ring is in "
                    f"a capture; expected memory for its reports; call it once before the capture"
                )
            self._records[key] = Record(len(found), found.device, describe)
        self._records[key].note(found)

    def error(self) -> CommError | None:
        """Return the error of what was reported and not returned yet; never blocks."""
        self._look()
        error, self._pending = self._pending, None
        return error

    def _look(self) -> None:
        """Read a report, unless one is still pending."""
        if self._pending is None:
            self._pending = self._reported()

    def _reported(self) -> CommError | None:
        error = self._described()
        return None if error is None else type(error)(f"{error}; {_LATER}")

    def _described(self) -> CommError | None:
        overflow = None if self._kernels is None else self._kernels.overflow()
        if overflow is not None:
            return capacity_error(self._identity, overflow)
        for record in self._records.values():
            numbers = record.read()
            if numbers is not None:
                return record.describe(self._identity, numbers)
        return None

    @contextmanager
    def raised_after(self) -> Iterator[None]:
        """Raise what earlier calls have reported, after the call inside.

        Every rank has then launched the same calls, and none raises for its own call: whether the
        device has come that far differs between ranks.
        """
        self._look()
        earlier = self._pending  # stays pending if the call itself fails
        yield
        if earlier is not None:
            self._pending = None
            raise earlier

    def check(self) -> None:
        """Raise what was reported and not raised yet; never blocks."""
        error = self.error()
        if error is not None:
            raise error


class Record:
    """The last report of one kind on a device, and how many there were; the host reads a copy.

    The count is the first and the last element. They differ while the copy is being written.

    Attributes:
        describe: Returns the error of a report.
        copy: What the host reads: the count, the numbers of the report, the count.
    """

    def __init__(self, items: int, device: torch.device, describe: Describe) -> None:
        """``items``: of what ``note`` is given."""
        self.describe = describe
        pinned = device.type == "cuda"  # only then does a copy to it not block
        with torch.inference_mode(False):  # later calls write to it in any mode
            self._state = torch.zeros(items + 1, dtype=torch.int64, device=device)
            self.copy = torch.zeros(items + 1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._host, self._seen = self.copy.numpy(), 0

    def note(self, found: Tensor) -> None:
        """Keep a report on the device; a captured call does it at each replay."""
        number = self._state[:1] + found[:1]
        payload = torch.where(found[:1] > 0, found[1:], self._state[1:-1])
        self._state.copy_(torch.cat([number, payload, number]))
        self.copy.copy_(self._state, non_blocking=True)

    def read(self) -> list[int] | None:
        """Return the numbers of the last report if there was one since the last read.

        None while a copy is being written: the next read finds it.
        """
        last = int(self._host[-1])
        first, *numbers, end = map(int, self._host.tolist())
        # From either end: the copy may be written in either direction, and during the read.
        if first == self._seen or not last == end == first == int(self._host[0]):
            return None
        self._seen = first
        return numbers


def capacity_error(identity: RingIdentity, found: Overflow) -> CapacityError:
    """Return the error of an expert that has fewer rows than choices."""
    senders = [f"{count} from rank {rank}" for rank, count in enumerate(found.by_rank) if count]
    return CapacityError(
        f"{identity.describe('expert_dispatch')}: expert {found.expert} of rank {found.owner} got "
        f"{sum(found.by_rank)} rows ({', '.join(senders)}); capacity={found.capacity}, and the "
        f"rest was dropped; pass a larger capacity=, route fewer tokens to it, or pass "
        f"on_overflow='drop'"
    )
