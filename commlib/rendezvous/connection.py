"""A connection to a rendezvous store whose every operation ends within a deadline.

A client of a c10d store waits without limit for a server that is stopped. So each connection has
one daemon thread that alone uses the client, and callers wait for that thread with a deadline. The
thread exists before the interpreter shuts down, when no other thread can be started.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from commlib.deadlines import Deadline
from commlib.errors import BootstrapError
from commlib.log import log

Step = Callable[[Any], Any]

POST_S = 5.0  # to open a connection for an operation that nobody waits for
CLOSE_S = 1.0  # for queued operations when a connection is closed
_POLL_S = 0.1  # how often a wait checks whether its deadline was cancelled


class Opening(Protocol):
    """Open a store by ``deadline``; ``stage`` describes its progress for error messages."""

    stage: str

    def __call__(self, deadline: Deadline) -> Any:
        """Return the connected c10d store."""


class _Closed:
    """The opening of a closed connection: the real one may hold a store."""

    stage = ""

    def __call__(self, deadline: Deadline) -> Any:
        raise BootstrapError("the connection to the store is closed")

    def answers(self) -> bool:
        return False


class _Job:
    """One operation that is queued for the thread of a connection."""

    def __init__(self, step: Step, deadline: Deadline | None) -> None:
        self.step, self.deadline = step, deadline or Deadline(POST_S)
        self.started = False
        self.value: Any = None
        self.error: Exception | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self, store: Any) -> None:
        try:
            self.value = self.step(store)
        except Exception as error:
            self.error = error

    def finish(self) -> None:
        self._done.release()

    def wait(self, seconds: float) -> bool:
        return self._done.acquire(timeout=seconds)


def _serve(opening: Opening, jobs: "SimpleQueue[_Job | None]") -> None:
    """Run jobs in order; this frame has the store, and frees it at the end."""
    store: Any = None
    while (job := jobs.get()) is not None:
        job.started = True
        try:
            store = opening(job.deadline) if store is None else store
        except Exception as error:
            job.error = error
        else:
            job.run(store)
        job.finish()
        del job


def grace(deadline: Deadline) -> float:
    """Return the seconds that an operation gets after its deadline, to write what happened."""
    return min(2.0, max(0.5, deadline.seconds / 10))


class Connection:
    """One connection to a store, at ``where``, and the thread that uses it."""

    def __init__(self, opening: Opening, where: str) -> None:
        self.where, self.fault, self.closed = where, "", False
        self._opening = opening
        self._users, self._counting = 0, threading.Lock()
        self.clients: dict[float, Any] = {}  # for engines, by timeout
        self.spares: list[Any] = []  # each for one set-up at a time, which blocks its client
        self._start()
        _connections.add(self)

    def _start(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve,
            args=(self._opening, self._jobs),
            name=f"commlib store {self.where}",
            daemon=True,
        )
        self._thread.start()
        _threads.add(self._thread)

    def revive(self) -> None:
        """Open the connection again if an earlier operation made it faulty."""
        if self.fault and not self.closed:
            self._restart()

    def _restart(self) -> None:
        """Abandon the thread with its current operation, and open a second connection."""
        self._jobs.put(None)
        if self.closed:
            return
        self.fault = ""
        self.clients, self.spares = {}, []
        self._start()

    def run(self, what: str, step: Step, deadline: Deadline) -> Any:
        """Return ``step(store)``.

        Raises:
            BootstrapError: The store did not answer by ``deadline``, or answered with an error.
                The connection is then faulty, and later operations fail at once.
        """
        if self.fault:
            raise BootstrapError(self.fault)
        job = _Job(step, deadline)
        self._jobs.put(job)
        try:
            done = self._await(job, deadline)
        except BaseException:  # Ctrl-C: the next operation must not queue after this one
            self._restart()
            raise
        if not done and deadline.cancelled is not None:
            self._restart()
            raise BootstrapError(f"{what} was given up: {deadline.cancelled}")
        if not done:
            raise self._timeout_error(what, job, deadline)
        error = job.error
        if isinstance(error, RuntimeError | OSError) and not isinstance(error, BootstrapError):
            raise self._store_error(what, error) from error
        if error is not None:
            raise error
        return job.value

    def _await(self, job: _Job, deadline: Deadline) -> bool:
        """Wait for a job until its deadline and the grace have passed, or it is cancelled.

        The grace is counted in polls, not in clock time. If the host stops this process past the
        deadline, the store still has the whole grace to answer once the process runs again.

        Returns:
            True if the job is done.
        """
        polls = math.ceil(grace(deadline) / _POLL_S)
        cleaning_up = deadline.cancelled is not None  # this operation informs the other members
        while not job.wait(_POLL_S):
            if deadline.cancelled is not None and not cleaning_up:
                return False
            if deadline.passed():
                if polls == 0:
                    return False
                polls -= 1
        return True

    def _timeout_error(self, what: str, job: _Job, deadline: Deadline) -> BootstrapError:
        if not job.started:
            return BootstrapError(
                f"the rendezvous store at {self.where} was busy with another call for "
                f"{deadline.seconds:g} s before {what}"
            )
        stage = self._opening.stage
        doing = f"{what} (while {stage})" if stage else what
        self.fault = (
            f"the rendezvous store at {self.where} did not answer {doing} within "
            f"{deadline.seconds:g} s; is the process that serves it alive, or stopped?"
        )
        return BootstrapError(self.fault)

    def _store_error(self, what: str, error: Exception) -> BootstrapError:
        reason = str(error).partition("\n")[0]
        self.fault = (
            f"the rendezvous store at {self.where} failed in {what} "
            f"({type(error).__name__}: {reason}); is the process that serves it alive?"
        )
        return BootstrapError(self.fault)

    def post(self, step: Step) -> None:
        """Queue ``step(store)``; nobody waits for it."""
        if not self.fault:
            self._jobs.put(_Job(_logged(step, partial(_answers, self._opening)), None))

    def answers(self) -> bool:
        """Return False if no process serves the store any more; sends nothing.

        torch prints a stack trace for each request to a server that has exited. So operations
        after the end of a ring check this first.
        """
        return _answers(self._opening)

    def hold(self) -> None:
        """Count one more user: a ring, a roll call, or the table of the program's stores."""
        with self._counting:
            self._users += 1

    def release(self, seconds: float) -> None:
        """Count one user less; the last one closes the connection, in at most ``seconds``.

        The server of a store ends with the last reference to it. So this must not wait until
        Python collects the cycles of a ring.
        """
        with self._counting:
            self._users -= 1
            unused = not self._users
        if unused:
            self.close(seconds)

    def close(self, seconds: float) -> None:
        """End the thread after its queued operations; wait for that at most ``seconds``."""
        healthy = not self.fault
        self._end()
        if healthy:
            self._thread.join(seconds)

    def _end(self) -> None:
        self.closed, self.clients, self.spares = True, {}, []
        self.fault = self.fault or f"the connection to the store at {self.where} is closed"
        self._opening = _Closed()  # the thread has the other reference, and ends
        self._jobs.put(None)

    def __del__(self) -> None:
        self._jobs.put(None)


_connections: "weakref.WeakSet[Connection]" = weakref.WeakSet()
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()  # includes abandoned ones


def close_connections(seconds: float) -> None:
    """Close all connections before the exit, and wait for their threads at most ``seconds``.

    Python ends a thread that returns to an interpreter that is shutting down. Inside a store call
    this aborts the process, because the call's C++ frames can't be unwound.
    """
    end = time.monotonic() + seconds
    for connection in list(_connections):
        connection._end()
    for thread in list(_threads):
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


def forget() -> None:
    """Drop all connections in a forked child, without using or closing a socket.

    The stores stay in the frames of the parent's threads, which nothing clears in a child.
    """
    _threads.clear()
    for connection in list(_connections):
        connection.closed = True
        connection.fault = (
            f"the store at {connection.where} belongs to the parent of this forked process"
        )


def _answers(opening: Opening) -> bool:
    probe: Callable[[], bool] | None = getattr(opening, "answers", None)
    return probe is None or probe()


def _logged(step: Step, answers: Callable[[], bool]) -> Step:
    def attempt(store: Any) -> None:
        try:
            if answers():
                step(store)
        except Exception as error:
            log.once("unused keys could not be deleted from the store: %s", error)

    return attempt
