"""When the last replays of captured work began and ended on this rank."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch

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

    def mark(self, used: Any) -> Any:
        """Return a mark of this moment; ``used``: None, or one that may be used again."""

    def read(self, marks: Iterable[_Marks]) -> list[Replay]:
        """Return when marked replays were."""


class _HostClock:
    """The clock of the host, which all its processes share; a mark is the time in ns."""

    def mark(self, used: Any) -> int:
        return time.perf_counter_ns()

    def read(self, marks: Iterable[_Marks]) -> list[Replay]:
        return [Replay(*each) for each in marks]


class _GpuClock:
    """The clock of a GPU; a mark is an event on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self, used: torch.cuda.Event | None) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True) if used is None else used
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, marks: Iterable[_Marks]) -> list[Replay]:
        """Wait for the GPU's work so far, and place events on the host clock by one more event.

        That is exact to some 10 µs; the length of a replay is exact to 1 µs.
        """
        torch.cuda.synchronize(self._device)
        now = self.mark(None)
        now.synchronize()
        host = time.perf_counter_ns()
        found = []
        for number, began, ended in marks:
            first = host - round(began.elapsed_time(now) * 1e6)
            found.append(Replay(number, first, first + round(began.elapsed_time(ended) * 1e6)))
        return found


class ReplayTimes:
    """The beginnings and ends of the last replays of one captured stretch of work."""

    def __init__(self, device: torch.device, most: int) -> None:
        """Keep those of ``most`` replays."""
        self._on_gpu, self._most = device.type == "cuda", most
        self._clock: _Clock = _GpuClock(device) if self._on_gpu else _HostClock()
        self._last: deque[_Marks] = deque()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Mark the beginning and the end of a ``with`` block; the host does not wait."""
        if self._on_gpu and capturing():  # events of a capture by hand have no times
            yield
            return
        full = len(self._last) == self._most
        used = self._last.popleft() if full else _Marks(0, None, None)
        began = self._clock.mark(used.began)
        yield
        self._last.append(_Marks(next(_numbers), began, self._clock.mark(used.ended)))

    def replays(self) -> list[Replay]:
        """Return the last replays, the oldest first; waits for the GPU's work so far."""
        return self._clock.read(list(self._last))
