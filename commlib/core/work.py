"""A collective under way, and what waiting for it means on a host and on a stream."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, Protocol

import torch
from typing_extensions import TypeVar

from commlib.deadlines import Deadline
from commlib.deferred import hold_until, hold_until_captured
from commlib.errors import ArgumentError, CommTimeout, RingError
from commlib.streams import capture_of, capturing, is_permanent


class Pending(Protocol):
    """The remaining step before a result may be read."""

    def join(self, deadline: Deadline | None = None) -> None:
        """Make the result safe to use for the caller; with a deadline, block the host."""

    def done(self) -> bool:
        """Return True if the result is there already; never blocks."""


Result = TypeVar("Result", default=Any, covariant=True)


class Work(Generic[Result]):
    """The handle of an asynchronous collective.

    ``wait()`` any number of times, from any thread. On a GPU the *waiter's* current
    stream waits for the collective and the host does not block. On a CPU the host blocks, at most
    for the ring's timeout. ``result`` is the output; its values are there after ``wait()``.
    A timeout of the call, or of ``wait``, blocks the host on a GPU too.
    """

    __slots__ = ("__weakref__", "_limit", "_pending", "_result")

    def __init__(
        self, result: Result, pending: Pending | None = None, limit: Deadline | None = None
    ) -> None:
        self._result = result
        self._pending = pending
        self._limit = limit  # of the call, from its launch on

    def __repr__(self) -> str:
        state = "finished" if self.done() else "in flight"
        if isinstance(self._result, torch.Tensor):
            return f"<Work of {self._result.dtype} {list(self._result.shape)}, {state}>"
        return f"<Work, {state}>"

    @property
    def result(self) -> Result:
        """The output of the collective, the same object at every call."""
        return self._result

    def wait(self, timeout: float | timedelta | None = None) -> Result:
        """Make the result safe to use where the caller is, and return it.

        Args:
            timeout: Seconds from now on until ``CommTimeout``. The host then blocks on a GPU too,
                until the collective has ended. Default: that of the call.

        Returns:
            ``result``.

        Raises:
            CommTimeout: The collective has not ended in time; the ring can't be used any more.
            EngineError: The engine reports a failure (CPU).
            ArgumentError: A timeout in a CUDA graph capture, or the call was made before it.
        """
        if self._pending is not None:
            self._pending.join(self._limit if timeout is None else Deadline(timeout))
        return self._result

    def _hold(self) -> None:
        """Keep the tensors until the collective has ended, also if nobody waits for it.

        Without it a stream whose Work is dropped waits, so that it can use their memory again.
        """
        if isinstance(self._pending, OnStream):
            self._pending.hold()

    def done(self) -> bool:
        """Return True if the collective has finished; never blocks.

        gloo reports a receive only to a thread that waits for it: False until then.
        """
        return self._pending is None or self._pending.done()


class Unlaunched:
    """A group that has not been left yet, that an exception has left, or whose launch failed."""

    def __init__(self, why: Exception) -> None:
        self._why = why

    def join(self, deadline: Deadline | None = None) -> None:
        """Raise the reason: nothing has been launched."""
        raise self._why

    def done(self) -> bool:
        """Return False: nothing has finished."""
        return False


def _late(seconds: float) -> Exception:
    return CommTimeout(f"a collective did not finish within {seconds:g} s")


class OnHost:
    """The work of a CPU engine; ``await_`` blocks until a deadline and puts the result in place.

    What a signal handler raises meanwhile, such as KeyboardInterrupt, is not the outcome of the
    call: the next ``join()`` waits again. ``await_`` must allow that.
    """

    def __init__(
        self,
        handle: Any,
        await_: Callable[[Deadline | None], None],
        keep: object,
        late: Callable[[float], Exception],
    ) -> None:
        self._handle, self._late = handle, late
        self._await: Callable[[Deadline | None], None] | None = await_
        self._keep = keep
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._error: Exception | None = None

    def join(self, deadline: Deadline | None = None) -> None:
        """Block until the work has finished; the first waiter finishes for all."""
        if self._process != os.getpid():  # its threads, and perhaps the lock's owner, are not here
            raise RingError(
                f"this Work belongs to process {self._process}; this is its fork {os.getpid()}; "
                f"wait for it in the parent"
            )
        if deadline is None:
            self._lock.acquire()
        elif not self._lock.acquire(timeout=deadline.left()):  # another thread waits longer
            raise self._late(deadline.seconds)
        try:
            if self._await is not None:
                try:
                    self._await(deadline)
                except Exception as error:
                    self._error = error
                self._await = self._keep = None
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return True if the work has finished."""
        return self._await is None or self._handle is None or bool(self._handle.is_completed())


class AllOf:
    """Works on a host that were launched as one operation; each can be waited for by itself."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self.parts = parts

    def join(self, deadline: Deadline | None = None) -> None:
        """Block until every work has finished."""
        for part in self.parts:
            part.join(deadline)

    def done(self) -> bool:
        """Return True if every work has finished."""
        return all(part.done() for part in self.parts)


class Then:
    """A work on a host with a step after it, which is taken once, by the first waiter."""

    def __init__(self, work: Work, step: Callable[[], None]) -> None:
        self._work = work
        self._step: Callable[[], None] | None = step
        self._lock = threading.Lock()

    def join(self, deadline: Deadline | None = None) -> None:
        """Block until the work has ended, and take the step."""
        if self._work._pending is not None:
            self._work._pending.join(deadline)
        with self._lock:
            if self._step is not None:
                self._step()
                self._step = None

    def done(self) -> bool:
        """Return True if the work has ended."""
        return self._work.done()


def await_event(
    event: torch.cuda.Event, deadline: Deadline, late: Callable[[float], Exception]
) -> None:
    """Block the host until an event; raise ``late(seconds)`` at the deadline."""
    if capturing():
        raise ArgumentError(
            "a timeout during a CUDA graph capture: the host can't wait for work that a capture "
            "records; leave timeout= away"
        )
    if not deadline.poll(event.query):
        raise late(deadline.seconds)


class OnStream:
    """An event on the comm stream, and the tensors that must live until somebody has waited.

    ``capture`` is the number of the CUDA graph capture that the call is part of, 0 for none. An
    event is of use only in the capture that it was recorded in, or outside of all of them.
    """

    def __init__(
        self,
        event: torch.cuda.Event,
        origin: torch.cuda.Stream,
        keep: object,
        capture: int = 0,
        late: Callable[[float], Exception] = _late,
    ) -> None:
        self._event, self._late = event, late
        self._device = origin.device
        # A stream of another library may be destroyed at any time: it is not touched again.
        self._origin = origin if is_permanent(origin) else None
        self._keep = keep
        self._capture = capture

    def join(self, deadline: Deadline | None = None) -> None:
        """Make the caller's current stream, and the stream of the call, wait for the collective.

        Raises:
            ArgumentError: The current stream is being captured and the call was made before, or
                there is a deadline.
            CommTimeout: The collective has not ended at the deadline.
        """
        stream = torch.cuda.current_stream(self._device)
        capture = capture_of(stream.cuda_stream)
        if capture == self._capture:
            self._event.wait(stream)
        elif not self._capture:
            raise ArgumentError(
                "wait() during a CUDA graph capture for a call made before it, which would "
                "invalidate the capture; call wait() before the capture begins"
            )
        # else the capture is over, and its graph contains the wait already
        if deadline is not None:
            await_event(self._event, deadline, self._late)
        self._release()

    def done(self) -> bool:
        """Return True if the event has happened."""
        return bool(self._event.query())

    def hold(self) -> None:
        """Make no stream wait for the memory of the tensors; the host looks when it is free."""
        if not self._capture:
            self._origin = None

    def _release(self) -> None:
        keep, self._keep = self._keep, None
        if keep is None:
            return
        if self._origin is None:
            if not self._capture:
                hold_until(self._event, keep)
            return
        # The allocator reuses a tensor in the order of the stream that it was made on.
        capture = capture_of(self._origin.cuda_stream)
        if capture == self._capture:
            self._event.wait(self._origin)
        elif not self._capture:  # the stream is being captured: it must not wait for this event
            hold_until_captured(self._event, self._origin, keep)
        # else the capture is over, and the memory belongs to its graph

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at the end of the process the memory is not reused
            self._release()
