"""Blocking waits for a CPU engine that let signals such as Ctrl-C through."""

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from threading import get_ident
from typing import Any

# While torch waits, Python runs no signal handler, so a wait is cut into slices of this length.
_SLICE = timedelta(seconds=0.1)
_SLICE_OVER = "Operation timed out"  # how torch says that a slice was too short

_idle: list["SimpleQueue[Callable[[], None]]"] = []  # helper threads without a job


def wait_for(handle: Any) -> None:
    """Block until ``handle`` has finished; a signal is handled after 0.1 s at most.

    Args:
        handle: A work of a ``torch.distributed`` collective, which may be waited for again after
            an interruption, or an object of ours whose ``wait()`` keeps the same promise.

    Raises:
        Exception: What the engine reports, at its own deadline at the latest.
        BaseException: What a signal handler raises; the call continues.
    """
    if isinstance(handle, Interruptible):
        handle.wait()
        return
    while not handle.is_completed():
        try:
            handle.wait(_SLICE)
        except RuntimeError as error:
            if _SLICE_OVER not in str(error):
                raise
        else:
            return
    handle.wait()


class Interruptible:
    """A handle whose ``wait()`` lets signals through and may be called again after one."""

    __slots__ = ()

    def wait(self) -> None:
        """Block until it has finished."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Return True if it has finished; never blocks."""
        raise NotImplementedError


class PointToPoint(Interruptible):
    """Sends and receives of gloo, which can be waited for only once and only without a time limit.

    A limit that passes makes gloo close the connection. Hence the main thread, where Python
    handles signals, has another thread wait for it; other threads wait by themselves.
    """

    __slots__ = ("_ended", "_error", "works")

    def __init__(self, works: Sequence[Any]) -> None:
        self.works: list[Any] = list(works)
        self._ended: threading.Lock | None = None  # locked while a helper thread waits
        self._error: Exception | None = None

    def wait(self) -> None:
        """Block until all have finished; raises what gloo reports, the same at every call."""
        if self._ended is None and get_ident() != threading.main_thread().ident:
            self._run()  # a second time there is nothing left
        else:
            if self._ended is None:
                self._hand_over()
            assert self._ended is not None
            with self._ended:  # a signal interrupts the main thread here
                pass
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Return True if all have finished; gloo does not say so of a receive before a wait."""
        return all(work.is_completed() for work in self.works)

    def _run(self) -> None:
        try:
            for work in self.works:
                work.wait()
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


os.register_at_fork(after_in_child=_idle.clear)  # a child has none of its parent's threads
