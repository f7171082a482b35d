"""Blocking waits for a CPU engine that let signals such as Ctrl-C through."""

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import get_ident
from typing import Any

from commlib.deadlines import Deadline

OVER = "timed out at the deadline of this wait"
SLICE_S = 0.1  # of a wait that Python or a look interrupts
_idle: list["SimpleQueue[Callable[[], None]]"] = []  # of helper threads without a job


class Interruptible:
    """A handle whose ``wait()`` lets signals through and may be called again after one."""

    __slots__ = ()

    def wait(self, deadline: Deadline | None = None) -> None:
        """Block until the operation has finished; raise ``RuntimeError`` at the deadline."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Return True if the operation has finished; never blocks."""
        raise NotImplementedError


class PointToPoint(Interruptible):
    """Sends and receives of gloo, which allow only one wait, and only without a timeout.

    A wait that times out makes gloo close the connection. The main thread, which handles signals
    in Python, therefore waits through a helper thread. Other threads wait directly.
    """

    __slots__ = ("_ended", "_error", "_limit", "_look", "works")

    def __init__(
        self,
        works: Sequence[Any],
        limit: Deadline | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Take the works.

        Args:
            works: Of the group.
            limit: Replaces the timeout of the group.
            look: Is called in every slice of a wait, and ends the wait by an error.
        """
        self.works: list[Any] = list(works)
        self._limit, self._look = limit, look
        self._ended: threading.Lock | None = None  # locked while a helper thread waits
        self._error: Exception | None = None

    def wait(self, deadline: Deadline | None = None) -> None:
        """Block until all have finished; raise gloo's error, the same at every call."""
        apart = deadline is not None or self._look is not None
        apart = apart or get_ident() == threading.main_thread().ident
        if self._ended is None and not apart:
            self._run()  # does nothing in a second call
        else:
            if self._ended is None:
                self._hand_over()
            assert self._ended is not None
            self._acquire(self._ended, deadline)
            self._ended.release()
        if self._error is not None:
            if self._look is not None:  # the failure may be that of the other member
                self._look()
            raise self._error

    def _acquire(self, ended: threading.Lock, deadline: Deadline | None) -> None:
        """Wait for the helper thread; a signal interrupts the main thread here."""
        if self._look is None:
            if not ended.acquire(timeout=-1 if deadline is None else deadline.left()):
                raise RuntimeError(OVER)
            return
        while not ended.acquire(
            timeout=SLICE_S if deadline is None else min(SLICE_S, deadline.left())
        ):
            self._look()
            if deadline is not None and deadline.passed():
                raise RuntimeError(OVER)

    def is_completed(self) -> bool:
        """Return True if all have finished; for a receive, gloo reports that only after a wait."""
        return all(work.is_completed() for work in self.works)

    def _run(self) -> None:
        try:
            for work in self.works:
                work.wait(*(() if self._limit is None else (self._limit.timedelta(),)))
        except Exception as error:
            self._error = error
        self.works = []

    def _hand_over(self) -> None:
        ended = threading.Lock()
        ended.acquire()

        def job() -> None:
            self._run()
            ended.release()

        jobs = _helper()
        self._ended = ended
        if jobs is None:
            job()
        else:
            jobs.put(job)


def _helper() -> "SimpleQueue[Callable[[], None]] | None":
    """Return the queue of a helper thread without a job; None if no thread can start any more."""
    try:
        return _idle.pop()
    except IndexError:
        pass
    jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
    try:
        threading.Thread(target=_serve, args=(jobs,), name="commlib waits", daemon=True).start()
    except RuntimeError:  # at the interpreter's exit
        return None
    return jobs


def _serve(jobs: "SimpleQueue[Callable[[], None]]") -> None:
    while True:
        jobs.get()()
        _idle.append(jobs)


os.register_at_fork(after_in_child=_idle.clear)  # a child does not have its parent's threads
