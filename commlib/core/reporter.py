"""The thread of a process that publishes the call logs of all its rings."""

import os
import threading
import time
from typing import Protocol

from commlib.log import log

_JOIN_S = 1.0  # The last close waits at most this long for the thread.
_ROUND_S = 5.0  # The time between two rounds of a ring with a long timeout.
_LOAD = 500  # All members of a ring may make this many requests per second together.


class Reports(Protocol):
    """The call log of one ring, as this thread sees it."""

    seconds: float

    def round(self) -> None:
        """Publish, and compare with the neighbours."""

    def requests(self) -> int:
        """Return what one round costs the store, over all members."""


class _Reporter:
    """One thread per process that publishes the logs of all its rings, as often as it may."""

    def __init__(self) -> None:
        self._rings: list[Reports] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, reports: Reports) -> None:
        with self._changed:
            self._rings.append(reports)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="commlib call reports", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def remove(self, reports: Reports) -> None:
        """Take a ring out; the thread ends with the last one."""
        with self._changed:
            if reports in self._rings:
                self._rings.remove(reports)
            thread, idle = self._thread, not self._rings
            self._changed.notify()
        if idle and thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _pause(self) -> float:
        """Seconds between two rounds: short deadlines need fresh logs, the store needs rest."""
        most = sum(one.requests() for one in self._rings) / _LOAD
        return max(most, min([_ROUND_S, *(one.seconds / 4 for one in self._rings)]))

    def _run(self) -> None:
        while True:
            with self._changed:
                begin = time.monotonic()  # a ring that joins may need a shorter pause
                while self._rings and (left := begin + self._pause() - time.monotonic()) > 0:
                    self._changed.wait(left)
                if not self._rings:
                    self._thread = None
                    return
                rings = list(self._rings)
            for reports in rings:
                try:
                    reports.round()
                except RuntimeError as error:  # no store: calls go on, they are not compared
                    log.once("the calls of a ring can't be compared: %s", error)

    def forget(self) -> None:
        """Begin again in a forked child, which has neither the thread nor the rings."""
        self.__init__()  # type: ignore[misc]


reporter = _Reporter()
os.register_at_fork(after_in_child=reporter.forget)
