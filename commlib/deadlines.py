"""One moment by which something must have happened."""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from commlib.errors import ArgumentError, CommTimeout
from commlib.worker_threads import workers

_LOOK_S = 0.05  # how often a wait looks whether its deadline was cancelled


class Deadline:
    """A moment ``seconds`` from now on the monotonic clock."""

    __slots__ = ("_end", "cancelled", "seconds")

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
        self.cancelled: str | None = None

    def cancel(self, reason: str) -> None:
        """End every wait for this deadline, from any thread; ``reason`` says what overtook it."""
        self.cancelled = reason
        self._end = -math.inf

    def left(self) -> float:
        """Seconds that remain, never below 0."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        """Return True if the moment is over, or the deadline was cancelled."""
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
    """Run a step that may block in a worker thread, and stop waiting for it at the deadline.

    The thread is left alone then: nothing can end it.

    Args:
        step: Takes no arguments.
        deadline: The wait also ends when the deadline is cancelled.
        what: Names the step in errors.

    Returns:
        What ``step`` returns.

    Raises:
        CommTimeout: The step is late, or no thread is left for it while the interpreter exits.
        Exception: What ``step`` raises.
    """
    task = workers.start(step, what)
    if task is None:
        raise CommTimeout(f"{what} was not started: earlier steps hold every worker thread")
    while not task.wait(min(deadline.left(), _LOOK_S)):
        if deadline.passed():
            if deadline.cancelled is not None:
                raise CommTimeout(f"{what} was given up: {deadline.cancelled}")
            raise CommTimeout(f"{what} did not return within {deadline.seconds:g} s")
    if task.error is not None:
        raise task.error
    return task.result
