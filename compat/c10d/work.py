"""A collective under way as ``torch.distributed`` sees it."""

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commlib.compat.c10d.options import duration
from commlib.core.compiler import untraced_methods
from commlib.core.context import CommContext
from commlib.core.work import Work
from commlib.streams import capturing
from commlib.worker_threads import Task, workers

Tensor = torch.Tensor
_NO_TIMEOUT = timedelta(0)


@untraced_methods
class GroupWork(dist.Work):
    """Works of a ring with the interface of ``torch.distributed.Work``.

    Args:
        ring: The ring of the collective.
        works: What the ring returned.
        tensors: The outputs, for ``result()`` and the future.
        source: The sender of a receive, as a position in the group.
    """

    def __init__(
        self, ring: CommContext, works: list[Work], tensors: list[Tensor], *, source: int = -1
    ) -> None:
        super().__init__()
        self._ring, self._works, self._tensors = ring, works, tensors
        self._source = source
        self._lock = threading.Lock()
        self._task: Task | None = None  # waits on a host for those who must not block
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._unset: torch.futures.Future[Any] | None = None  # while it is not complete

    # -- what C++ calls ----------------------------------------------------------------------------

    def wait(self, timeout: timedelta | float = _NO_TIMEOUT) -> bool:
        """Make the results safe to use; the host blocks on a CPU, and with a timeout.

        Raises:
            CommTimeout: The collective has not ended within ``timeout``, or the group's timeout.
                The ring can't be used any more.
            EngineError: The engine reports a failure.
        """
        max_wait = duration(timeout)
        self._join(max_wait if max_wait > _NO_TIMEOUT else None)
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return the future of the outputs; it needs no one to call ``wait``.

        On a CPU it is complete after a wait of any kind, and at once if the call has ended.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            if self._ring.stream is not None:
                self._future = self._future_of_stream(self._ring.stream)
                return self._future
            future = self._future = self._unset = torch.futures.Future()
        ended = all(work.done() for work in self._works)
        if ended or workers.start(self._outcome, "a future") is None:
            self._outcome()
        return future

    def _future_of_stream(self, stream: torch.cuda.Stream) -> torch.futures.Future[list[Tensor]]:
        """Return a future whose waiters' streams wait for what ``stream`` has now."""
        device = self._ring.device
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[device])
        for work in self._works:
            work._hold()  # the caller may drop this object, and its stream must not wait for that
        with torch.cuda.stream(stream):
            future.set_result(self._tensors)
        return future

    # -- what programs call ------------------------------------------------------------------------

    def is_completed(self) -> bool:
        """Return True if the collective has ended; never blocks."""
        done = all(work.done() for work in self._works)
        if self._ring.stream is not None:
            return done
        waited = self._task is not None and self._task.wait(0)
        if not waited and not done:
            # gloo reports the end of a receive only to a thread that waits
            self._start()
            return False
        self._outcome()  # which puts the outputs in their place
        return True

    def is_success(self) -> bool:
        """Return True if the collective has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of a collective that has ended; None without one."""
        return self._outcome() if self.is_completed() else None

    def synchronize(self) -> None:
        """Make the results safe to use."""
        self._join()

    def block_current_stream(self) -> None:
        """Make the current stream wait for the collective; on a CPU the host waits."""
        self._join()

    def result(self) -> list[Tensor]:
        """Return the outputs."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the position of the sender of a receive; -1 for any other call."""
        return self._source

    _source_rank = source_rank

    # -- batches -----------------------------------------------------------------------------------

    def each(self) -> list["GroupWork"]:
        """Return one work per call of a batch of sends and receives; NCCL has one for all."""
        batch, tensors = self._works[0], self._tensors
        if self._ring.stream is not None or len(tensors) == 1:
            return [self]
        # An observed call has no parts, which a capture waits for together.
        parts = getattr(batch._pending, "parts", [batch._pending] * len(tensors))
        return [
            GroupWork(self._ring, [Work(x, part, batch._limit)], [x])
            for x, part in zip(tensors, parts, strict=True)
        ]

    # -- ends --------------------------------------------------------------------------------------

    def _join(self, timeout: timedelta | None = None) -> None:
        try:
            for work in self._works:
                work.wait(timeout)
        except Exception as error:
            self._complete(error)
            raise
        if self._future is not None:
            self._complete(None)

    def _complete(self, error: Exception | None) -> None:
        """Complete the future; the first thread does it, and others wait for that."""
        with self._lock:
            future, unset, self._unset = self._future, self._unset, None
        if unset is None:
            if future is not None and not future.done():
                with suppress(Exception):  # the error is that of this wait too
                    future.wait()
        elif error is None:  # without the lock: a callback may ask for the future
            unset.set_result(self._tensors)
        else:
            unset.set_exception(error)

    def _outcome(self) -> Exception | None:
        """Join a collective that has ended; return its error, which every join raises."""
        try:
            self._join()
        except Exception as error:
            return error
        return None

    def _start(self) -> None:
        """Start the task that waits for the end on a host, once."""
        with self._lock:
            if self._task is None:
                self._task = workers.start(self._join, "a call whose end is asked for")


@untraced_methods
class HostBarrier(GroupWork):
    """A barrier, whose ``wait`` blocks the host on every device, as that of torch does."""

    def wait(self, timeout: timedelta | float = _NO_TIMEOUT) -> bool:
        """Block until every rank has called the barrier.

        Raises:
            CommTimeout: Ranks are missing at the deadline.
        """
        timeout = duration(timeout)
        limited = timeout > _NO_TIMEOUT or any(work._limit is not None for work in self._works)
        if not limited and self._ring.stream is not None and not capturing():
            timeout = timedelta(seconds=self._ring.timeout)
        return super().wait(timeout)


@untraced_methods
class Done(dist.Work):
    """The work of a call that its stream orders, or that has ended on the host already."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True: nothing is left to wait for."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the results are there."""


DONE = Done()
