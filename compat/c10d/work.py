"""A collective under way as ``torch.distributed`` sees it."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commlib.core import failures
from commlib.core.context import CommContext
from commlib.core.work import Work
from commlib.deadlines import Deadline
from commlib.errors import CommError, CommTimeout
from commlib.streams import capturing
from commlib.worker_threads import Task, workers

Tensor = torch.Tensor
_NO_TIMEOUT = timedelta(0)


class GroupWork(dist.Work):
    """A ``Work`` of a ring with the interface of ``torch.distributed.Work``.

    Args:
        ring: The ring of the collective.
        work: What the ring returned.
        tensors: The outputs, for ``result()`` and the future.
        finish: What is left to do on a host when the collective has ended.
        limit: Seconds of every wait on a host; None for the ring's own timeout.
        source: The sender of a receive, as a position in the group.
    """

    def __init__(
        self,
        ring: CommContext,
        work: Work | None,
        tensors: list[Tensor],
        *,
        finish: Callable[[], None] | None = None,
        limit: float | None = None,
        source: int = -1,
    ) -> None:
        super().__init__()
        self._ring, self._work, self._tensors = ring, work, tensors
        self._finish, self._limit, self._source = finish, limit, source
        self._collective = ring._last or "a call"
        self._lock = threading.Lock()
        self._task: Task | None = None  # waits on a host for those who must not block

    # -- what C++ calls ----------------------------------------------------------------------------

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Make the results safe to use; the host blocks on a CPU, and with a timeout.

        Raises:
            CommTimeout: The collective has not ended within ``timeout``, or the group's timeout.
                The ring can't be used any more.
            EngineError: The engine reports a failure.
        """
        seconds = self._seconds(timeout)
        if seconds is not None:
            self._await_end(seconds)
        self._join()
        return True

    def _seconds(self, timeout: timedelta) -> float | None:
        """Return the seconds of a wait with this timeout; None for the ring's own timeout."""
        return timeout.total_seconds() if timeout > _NO_TIMEOUT else self._limit

    def get_future(self) -> Any:
        """Return a future of the outputs; it needs no one to call ``wait``."""
        if self._ring.stream is not None:
            return self._future_of_stream(self._ring.stream)
        future: Any = torch.futures.Future()

        def complete() -> None:
            try:
                self._join()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._tensors)

        if self._work is None or workers.start(complete, "a future") is None:
            complete()
        return future

    def _future_of_stream(self, stream: torch.cuda.Stream) -> Any:
        """Return a future whose waiters' streams wait for what ``stream`` has now."""
        device = self._ring.device
        future: Any = torch.futures.Future(devices=[device])
        if self._work is None:
            future.set_result(self._tensors)
            return future
        self._work._hold()  # the caller may drop this object, and its stream must not wait for that
        with torch.cuda.stream(stream):
            future.set_result(self._tensors)
        return future

    # -- what programs call ------------------------------------------------------------------------

    def is_completed(self) -> bool:
        """Return True if the collective has ended; never blocks."""
        if self._ring.stream is not None:
            return self._work is None or self._work.done()
        waited = self._task is not None and self._task.wait(0)
        if self._work is not None and not waited and not self._work.done():
            # gloo reports the end of a receive only to a thread that waits
            self._started()
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

    # -- ends --------------------------------------------------------------------------------------

    def _join(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._finish is not None:
            with self._lock:
                if self._finish is not None:
                    self._finish()
                    self._finish = None

    def _outcome(self) -> Exception | None:
        """Join a collective that has ended; return its error, which every join raises."""
        try:
            self._join()
        except Exception as error:
            return error
        return None

    def _started(self) -> Task | None:
        """Return the task that waits for the end on a host, and start it if there is none."""
        with self._lock:
            if self._task is None and self._work is not None:
                self._task = workers.start(self._work.wait, "a wait with a timeout")
            return self._task

    def _await_end(self, seconds: float) -> None:
        """Block the host until the collective has ended, at most ``seconds``."""
        if self._work is None:
            return
        if self._ring.stream is not None:
            ended = Deadline(seconds).poll(self._work.done)
        else:
            task = self._started()
            ended = task is None or task.wait(seconds)
        if not ended:
            raise self._late(seconds)

    def _late(self, seconds: float) -> CommError:
        """Return the error of a call that has not ended in time; the ring has failed then."""
        ring = self._ring
        others = [at for at in range(ring.size) if at != ring.rank]
        text = failures.late(others if len(others) == 1 else [], ring.ranks, seconds, "")
        return ring._health.failed(self._collective, CommTimeout(text))


class HostBarrier(GroupWork):
    """A barrier, whose ``wait`` blocks the host on every device, as that of torch does."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until every rank has called the barrier.

        Raises:
            CommTimeout: Ranks are missing at the deadline.
        """
        super().wait(timeout)
        ring = self._ring
        if ring.stream is not None and not capturing():
            ended = torch.cuda.Event()
            ended.record(torch.cuda.current_stream(ring.device))
            seconds = self._seconds(timeout) or ring.timeout
            if not Deadline(seconds).poll(ended.query):
                raise self._late(seconds)
        return True


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
