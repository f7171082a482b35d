"""Blocking waits for a CPU engine that let signals such as Ctrl-C through."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import get_ident
from typing import Any

from commlib.deadlines import Deadline
from commlib.log import log

OVER = "timed out at the deadline of this wait"
SLICE_S = 0.1  # of a wait that Python or a look interrupts
_UNLIMITED_S = 1e8
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

    __slots__ = ("_dropped", "_ended", "_error", "_limit", "_look", "_tensors", "works")

    def __init__(
        self,
        works: Sequence[Any],
        limit: Deadline | None = None,
        look: Callable[[], None] | None = None,
        tensors: object = None,
        dropped: "Dropped | None" = None,
    ) -> None:
        """Take the works.

        Args:
            works: Of the group.
            limit: Replaces the timeout of the group.
            look: Is called in every slice of a wait, and ends the wait by an error.
            tensors: What the works read and write.
            dropped: Keeps the handle if nobody waits for it. Default: gloo cancels the works then.
        """
        self.works: list[Any] = list(works)
        self._limit, self._look = limit, look
        self._tensors, self._dropped = tensors, dropped
        self._ended: threading.Lock | None = None  # locked while a helper thread waits
        self._error: Exception | None = None

    @classmethod
    def joined(cls, handles: Sequence["PointToPoint"]) -> "PointToPoint":
        """Return one handle, without a limit and a look, that takes the works of several."""
        works = [work for handle in handles for work in handle.works]
        tensors = [handle._tensors for handle in handles]
        for handle in handles:
            handle.works = []
        return cls(works, tensors=tensors, dropped=handles[0]._dropped)

    def __del__(self) -> None:
        if self.works and self._dropped is not None and not sys.is_finalizing():
            self._dropped.keep(self)

    def finish(self) -> None:
        """Block until all have ended, however long that takes; an error only has a line in the log.

        As long as nobody waits, gloo has no deadline, and a dropped handle gets none either.
        """
        self._limit, self._look = Deadline(_UNLIMITED_S), None
        self._run()
        if self._error is not None:
            log.info("a send or receive whose Work was dropped has not ended: %s", self._error)

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
        self.works, self._tensors = [], None

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


class Dropped:
    """Handles of one peer and direction that nobody has waited for, until their works have ended.

    gloo cancels a work that nobody holds, and reports its end only to a thread that waits. One
    helper thread waits for all of them, in the order in which they were dropped.
    """

    def __init__(self) -> None:
        self._kept: deque[PointToPoint] = deque()
        self._served = threading.Lock()  # locked while a helper thread waits; nobody waits for it
        self._process: int | None = os.getpid()

    def keep(self, handle: PointToPoint) -> None:
        """Keep a handle, unless the connections have ended; a collection of garbage calls this."""
        if self._process == os.getpid():
            self._kept.append(handle)
            self._serve()

    def _serve(self) -> None:
        if self._kept and self._served.acquire(blocking=False):
            jobs = _helper()
            if jobs is None:
                self._served.release()  # a later handle tries again
            else:
                jobs.put(self._finish)

    def _finish(self) -> None:
        while self._kept:
            self._kept[0].finish()
            self._kept.popleft()
        self._served.release()
        self._serve()  # what was dropped before the release

    def close(self) -> None:
        """Keep no more handles."""
        self._process = None

    @property
    def ended(self) -> bool:
        """True if no work goes on."""
        return not self._kept


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
