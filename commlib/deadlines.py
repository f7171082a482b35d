"""Deadlines, and steps that are bounded by one."""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from commlib.errors import ArgumentError, CommTimeout
from commlib.worker_threads import workers

_POLL_S = 0.05  # how often a wait checks whether its deadline was cancelled


class Deadline:
    """A moment ``seconds`` from now on the monotonic clock."""

    __slots__ = ("_end", "cancelled", "seconds")

    def __init__(self, seconds: float | timedelta) -> None:
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        try:
            valid = 0 < seconds < math.inf and not isinstance(seconds, bool)
        except TypeError:  # not a number
            valid = False
        if not valid:
            raise ArgumentError(f"timeout={seconds!r}: expected a finite number of seconds above 0")
        self.seconds = float(seconds)
        self._end = time.monotonic() + self.seconds
        self.cancelled: str | None = None

    def cancel(self, reason: str) -> None:
        """End every wait for this deadline, from any thread; ``reason`` appears in their errors."""
        self.cancelled = reason
        self._end = -math.inf

    def left(self) -> float:
        """Return the seconds that remain, never below 0."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        """Return True if the deadline has passed or was cancelled."""
        return time.monotonic() >= self._end

    def timedelta(self) -> timedelta:
        """Return the remaining time, at least 1 ms (a store takes 0 as "the default")."""
        return timedelta(seconds=max(0.001, self.left()))

    def poll(self, ready: Callable[[], bool], longest_sleep: float = 0.01) -> bool:
        """Call ``ready`` with growing pauses until it is true; return False at the deadline."""
        pause = 20e-6
        while not ready():
            if self.passed():
                return False
            time.sleep(min(pause, longest_sleep, self.left()))
            pause *= 2
        return True


def bounded(step: Callable[[], Any], deadline: Deadline, what: str) -> Any:
    """Run a step that may block in a worker thread, and stop waiting for it at the deadline.

    A thread that is late continues to run, because nothing can end it.

    Args:
        step: A function without arguments.
        deadline: The wait also ends when the deadline is cancelled.
        what: The name of the step in errors.

    Returns:
        The result of ``step``.

    Raises:
        CommTimeout: The step is late, or the exiting interpreter has no thread for it.
        Exception: Any error of ``step``.
    """
    task = workers.start(step, what)
    if task is None:
        raise CommTimeout(f"{what} was not started: earlier steps hold every worker thread")
    while not task.wait(min(deadline.left(), _POLL_S)):
        if deadline.passed():
            if deadline.cancelled is not None:
                raise CommTimeout(f"{what} was given up: {deadline.cancelled}")
            raise CommTimeout(f"{what} did not return within {deadline.seconds:g} s")
    if task.error is not None:
        raise task.error
    return task.result
