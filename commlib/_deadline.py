"""One moment by which something must have happened."""

import math
import time
from collections.abc import Callable
from datetime import timedelta

from commlib.errors import ArgumentError


class Deadline:
    """A moment ``seconds`` from now on the monotonic clock."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float | timedelta) -> None:
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        if not 0 < seconds < math.inf:
            raise ArgumentError(f"timeout={seconds!r}: expected a finite number of seconds above 0")
        self.seconds = float(seconds)
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds that remain, never below 0."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        """Whether the moment lies behind."""
        return time.monotonic() >= self._end

    def timedelta(self) -> timedelta:
        """What remains, at least a millisecond (a store takes 0 for "the default")."""
        return timedelta(seconds=max(0.001, self.left()))

    def poll(self, ready: Callable[[], bool], longest_sleep: float = 0.01) -> bool:
        """Ask ``ready`` with growing pauses until it is true or the deadline has passed."""
        pause = 20e-6
        while not ready():
            if self.passed():
                return False
            time.sleep(min(pause, longest_sleep, self.left()))
            pause *= 2
        return True
