"""Sends and receives on GPUs, which are launched together: NCCL runs one call after the other."""

import threading
from datetime import timedelta
from threading import get_ident
from typing import Any
from weakref import WeakSet

from commlib.compat.c10d.launching import Batch, Step, launch_async
from commlib.compat.c10d.work import GroupWork
from commlib.core.context import CommContext

_NO_TIMEOUT = timedelta(0)


class PairWork(GroupWork):
    """A send or a receive that is launched when somebody asks for it, or before any other call."""

    def __init__(self, queued: "_Queue", step: Step, source: int) -> None:
        super().__init__(queued.ring, None, step.tensors, source=source)
        self._queue = queued

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Launch what is queued, and make the result safe to use."""
        self._queue.launch()
        return super().wait(timeout)

    def get_future(self) -> Any:
        """Launch what is queued, and return a future of the outputs."""
        self._queue.launch()
        return super().get_future()

    def is_completed(self) -> bool:
        """Launch what is queued; return True if the call has ended."""
        self._queue.launch()
        return super().is_completed()

    def _join(self) -> None:
        self._queue.launch()
        super()._join()

    def __del__(self) -> None:
        self._queue.launch()  # a send that nobody waits for


class _Queue:
    """The sends and receives of one thread on one ring that are launched as one operation."""

    def __init__(self, ring: CommContext) -> None:
        self.ring, self.batch = ring, Batch()
        self.works: WeakSet[PairWork] = WeakSet()
        self.launched = False
        self._lock = threading.Lock()
        self._thread = get_ident()

    def add(self, step: Step, source: int) -> PairWork:
        """Add a step and return its work."""
        self.batch.add(self.ring, step)
        work = PairWork(self, step, source)
        self.works.add(work)
        return work

    def launch(self) -> None:
        """Launch the calls, once."""
        if self.launched:
            return
        with self._lock:
            if self.launched:
                return
            self.launched = True
            mine = _queues.get(self._thread, {})
            mine.pop(self.ring.ring_id, None)
            if not mine:
                _queues.pop(self._thread, None)
            done = launch_async(self.ring, self.batch.step())
            for work in self.works:
                work._work = done._work


_queues: dict[int, dict[int, _Queue]] = {}  # by thread and ring id


def queue(ring: CommContext, step: Step, source: int = -1) -> GroupWork:
    """Add a send or a receive to those that the calling thread launches together.

    ``torch.distributed.batch_isend_irecv`` gives no other sign of a batch to a group that is
    written in Python. A send and a receive that are launched one after the other would wait for
    each other on two GPUs.
    """
    mine = _queues.setdefault(get_ident(), {})
    queued = mine.get(ring.ring_id)
    if queued is None:
        queued = mine[ring.ring_id] = _Queue(ring)
    return queued.add(step, source)


def queued() -> bool:
    """Return True if any thread has calls that are not launched."""
    return bool(_queues)


def flush() -> None:
    """Launch what the calling thread has queued; every other call of a group does so first."""
    if _queues:
        for queued in list(_queues.get(get_ident(), {}).values()):
            queued.launch()
