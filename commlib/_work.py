"""A collective under way, and what waiting for it means on a host and on a stream."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from commlib.errors import ArgumentError, RingError


class Pending(Protocol):
    """What is still to happen before a result may be read."""

    def join(self) -> None:
        """Make the result safe to use for the caller."""

    def done(self) -> bool:
        """Whether the result is there already; never blocks."""


class Work:
    """The handle of an asynchronous collective.

    ``wait()`` any number of times, from any thread. On a GPU it orders the *waiter's* current
    stream behind the collective and does not block the host; on a CPU it blocks the host, at most
    for the ring's timeout. ``result`` is the output; its values are there after ``wait()``.
    """

    __slots__ = ("__weakref__", "_pending", "_result")

    def __init__(self, result: Any, pending: Pending | None = None) -> None:
        self._result = result
        self._pending = pending

    @property
    def result(self) -> Any:
        """The output of the collective, the same object at every call."""
        return self._result

    def wait(self) -> Any:
        """Make the result safe to use where the caller is, and return it.

        Raises ``CommTimeout`` or ``EngineError`` (CPU), the same one at every call.
        """
        if self._pending is not None:
            self._pending.join()
        return self._result

    def done(self) -> bool:
        """Whether the collective has finished; never blocks.

        gloo does not tell of a receive before somebody waits for it: False until then.
        """
        return self._pending is None or self._pending.done()


class Unlaunched:
    """A group that has not been left yet, or that an exception has left."""

    def __init__(self, why: str) -> None:
        self._why = why

    def join(self) -> None:
        """Refuse: nothing has been launched."""
        raise ArgumentError(self._why)

    def done(self) -> bool:
        """Report that nothing has finished."""
        return False


class All:
    """Several works of an engine as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether each has finished."""
        return all(work.is_completed() for work in self._works)


class OnHost:
    """Works of a CPU engine; ``await_`` blocks with a deadline and puts results in place."""

    def __init__(self, handles: Sequence[Any], await_: Callable[[], None], keep: object) -> None:
        self._handles = handles
        self._await: Callable[[], None] | None = await_
        self._keep = keep
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._error: BaseException | None = None

    def join(self) -> None:
        """Block until every work has finished; the first waiter finishes for all."""
        if self._process != os.getpid():  # its threads, and perhaps the lock's owner, are not here
            raise RingError(
                f"this Work belongs to process {self._process}; this is its fork {os.getpid()}; "
                f"wait for it in the parent"
            )
        with self._lock:
            if self._await is not None:
                try:
                    self._await()
                except BaseException as error:
                    self._error = error
                self._await = self._keep = None
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether every work has finished."""
        return self._await is None or all(h is None or h.is_completed() for h in self._handles)


class OnStream:
    """An event on the comm stream, and the tensors that must live until somebody has waited."""

    def __init__(self, event: torch.cuda.Event, origin: torch.cuda.Stream, keep: object) -> None:
        self._event = event
        self._origin = origin
        self._keep = keep

    def join(self) -> None:
        """Order the caller's current stream, and the stream of the call, behind the collective."""
        self._event.wait(torch.cuda.current_stream(self._origin.device))
        self._release()

    def done(self) -> bool:
        """Whether the event has happened."""
        return bool(self._event.query())

    def _release(self) -> None:
        if self._keep is not None:
            # The allocator reuses a tensor in the order of the stream that it was made on.
            self._event.wait(self._origin)
            self._keep = None

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at the end of the process the memory is not reused
            self._release()
