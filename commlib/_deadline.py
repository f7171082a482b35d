"""One moment by which something must have happened."""

import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from commlib.errors import ArgumentError, CommTimeout


class Deadline:
    """A moment ``seconds`` from now on the monotonic clock."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float | timedelta) -> None:
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        try:
            fits = 0 < seconds < math.inf
        except TypeError:  # no number at all
            fits = False
        if not fits:
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


def bounded(step: Callable[[], Any], deadline: Deadline, what: str) -> Any:
    """Run a step that may block in a thread of its own and give up waiting at the deadline.

    Returns what ``step`` returns and raises what it raises; ``CommTimeout`` when it is late. The
    thread is left to itself then: nothing can end it.
    """
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append((step(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=body, name=f"commlib {what}", daemon=True)
    thread.start()
    thread.join(deadline.left())
    if not outcome:
        raise CommTimeout(f"{what} did not return within {deadline.seconds:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
