"""Times at which the last replays of captured work began and ended on this rank."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch

from commlib.deadlines import Deadline
from commlib.streams import capturing

_numbers = count()  # of the replays of all functions, in their order


class Replay(NamedTuple):
    """One replay: its number in this process, and its beginning and end in ns of the host clock."""

    number: int
    began: int
    ended: int


class _Marks(NamedTuple):
    """The marks of one replay, as its clock makes them."""

    number: int
    began: Any
    ended: Any


class _Clock(Protocol):
    """Marks moments, and says later when they were."""

    def mark(self) -> Any:
        """Return a mark of this moment."""

    def read(self, marks: Iterable[_Marks], deadline: Deadline) -> list[Replay] | None:
        """Return when marked replays were; None if they have not ended at the deadline."""


class _HostClock:
    """The clock of the host, which all its processes share; a mark is the time in ns."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def read(self, marks: Iterable[_Marks], deadline: Deadline) -> list[Replay]:
        return [Replay(*each) for each in marks]


class _GpuClock:
    """The clock of a GPU; a mark is an event on the current stream.

    An event is not used again: another thread may be reading it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, marks: Iterable[_Marks], deadline: Deadline) -> list[Replay] | None:
        """Place events on the host clock by one more event.

        That is exact to some 10 µs; the length of a replay is exact to 1 µs. The events are waited
        for, not the GPU: another thread may be capturing.
        """
        if not all(deadline.poll(each.ended.query) for each in marks):
            return None
        now = self.mark()
        if not deadline.poll(now.query, longest_sleep=0):  # a pause would count as its time
            return None
        host = time.perf_counter_ns()
        replays = []
        for number, began, ended in marks:
            first = host - round(began.elapsed_time(now) * 1e6)
            replays.append(Replay(number, first, first + round(began.elapsed_time(ended) * 1e6)))
        return replays


class ReplayTimes:
    """The beginnings and ends of the last replays of one function on one device.

    Attributes:
        most: How many are kept.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self.most, self._on_gpu = most, device.type == "cuda"
        self._clock: _Clock = _GpuClock(device) if self._on_gpu else _HostClock()
        self._last: deque[_Marks] = deque(maxlen=most)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Mark the beginning and the end of a ``with`` block; the host does not wait."""
        if self._on_gpu and capturing():  # events of a capture by hand have no times
            yield
            return
        began = self._clock.mark()
        yield
        self._last.append(_Marks(next(_numbers), began, self._clock.mark()))

    def replays(self, deadline: Deadline) -> list[Replay] | None:
        """Return the last replays, in their order; None if some have not ended at the deadline."""
        return self._clock.read(list(self._last), deadline)


class FunctionTimes:
    """The times of a function's replays: one list per part and device for all kinds and slots."""

    def __init__(self, most: int) -> None:
        """Keep those of ``most`` replays per list."""
        self._most = most
        self._lists: dict[tuple[str, torch.device], ReplayTimes] = {}

    def of(self, part: str, device: torch.device) -> ReplayTimes:
        """Return where the times of ``part``, forward or backward, are kept."""
        return self._lists.setdefault((part, device), ReplayTimes(device, self._most))

    def parts(self) -> list[tuple[str, ReplayTimes]]:
        """Return each part with its times."""
        return [(part, times) for (part, _), times in list(self._lists.items())]
