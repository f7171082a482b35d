"""Sends and receives on GPUs, which are launched together: NCCL runs one call after the other."""

import threading
from collections import defaultdict
from contextlib import nullcontext
from datetime import timedelta
from threading import get_ident
from typing import NamedTuple
from weakref import WeakSet

import torch

from commlib.compat.c10d.launching import Batch, Step, launch_async
from commlib.compat.c10d.work import GroupWork
from commlib.core.compiler import untraced_methods
from commlib.core.context import CommContext
from commlib.core.memory import Uses
from commlib.errors import ArgumentError, RingError
from commlib.streams import capture_of


@untraced_methods
class PairWork(GroupWork):
    """A send or a receive that is launched when somebody asks for it, or before any other call."""

    def __init__(self, queued: "_Queue", step: Step, source: int) -> None:
        super().__init__(queued.ring, [], step.tensors, source=source)
        self._queue = queued

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Launch what is queued, and return a future of the outputs."""
        self._queue.launch()
        return super().get_future()

    def is_completed(self) -> bool:
        """Launch what is queued; return True if the call has ended, or if the launch failed."""
        try:
            self._queue.launch()
        except Exception:
            if self._queue.error is None:  # refused during a capture
                raise
            return True
        return super().is_completed()

    def _join(self, timeout: timedelta | None = None) -> None:
        self._queue.launch()
        super()._join(timeout)

    def __del__(self) -> None:
        self._queue.dropped()  # a send that nobody waits for


class Place(NamedTuple):
    """The place that calls are issued from: a stream (None on a CPU) and its capture."""

    stream: torch.cuda.Stream | None
    capture: int

    def can_launch(self, current: int) -> bool:
        """Return True if calls of this place can be launched while ``current`` is captured."""
        if self.stream is None:
            return self.capture == current
        now = capture_of(self.stream.cuda_stream)
        return now == self.capture and (bool(now) or not current)


def place_of(ring: CommContext) -> Place:
    """Return where a call on a ring is issued now."""
    if ring.stream is None:
        return Place(None, 0)
    stream = torch.cuda.current_stream(ring.device)
    return Place(stream, capture_of(stream.cuda_stream))


class _Queue:
    """The calls that one thread has issued in one place, and that are launched as one operation."""

    def __init__(self, ring: CommContext, place: Place) -> None:
        self.ring, self.place = ring, place
        self.error: Exception | None = None  # of the launch, for every work
        self._batch, self._works = Batch(), WeakSet[PairWork]()
        self._uses: defaultdict[int, Uses] = defaultdict(Uses)  # by peer
        self._started = False
        self._lock = threading.Lock()  # held during the launch
        self._key = (get_ident(), ring)
        _queues[self._key] = self

    def takes(self, step: Step, place: Place, source: int, peer: int) -> bool:
        """Return True if a step may run at the same time as the calls.

        With one peer torch runs calls of one tensor in their order. With several ones it does not:
        these are one operation, whose launch refuses them.
        """
        uses, writes = self._uses[peer], source >= 0
        return self.place == place and not any(uses.clash(x, writes=writes) for x in step.tensors)

    def add(self, step: Step, source: int, peer: int) -> PairWork | None:
        """Add a step and return its work; None if the calls are launched already."""
        with self._lock:
            if self._started:
                return None
            self._batch.add(self.ring, step)
            for x in step.tensors:
                self._uses[peer].add(x, writes=source >= 0)
            work = PairWork(self, step, source)
            self._works.add(work)
            return work

    def launch(self) -> None:
        """Launch the calls, once; another thread's launch is waited for.

        Raises:
            ArgumentError: A capture has begun since the calls, which stay queued; or the capture
                that they belong to has ended.
            CommError: The launch has failed; every call raises the same error.
        """
        with self._lock:
            if not self._started:
                self._start()
        if self.error is not None:
            raise self.error

    def dropped(self) -> None:
        """Launch the calls unless that is done, or the queue is in use: its user may be ours.

        A collection of garbage calls this anywhere. Calls that it leaves are launched by ``flush``.
        """
        if self._lock.acquire(blocking=False):
            try:
                if not self._started:
                    self._start()
            finally:
                self._lock.release()

    def give_up(self, why: Exception) -> None:
        """Make every work raise ``why``, unless a thread has begun to launch."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._started:
                    self._leave(why)
            finally:
                self._lock.release()

    def _leave(self, error: Exception | None) -> None:
        self._started, self.error = True, error
        if _queues.get(self._key) is self:
            del _queues[self._key]

    def _start(self) -> None:
        if not self.place.can_launch(place_of(self.ring).capture):
            self._refuse()
        self._leave(None)
        stream = self.place.stream
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                done = launch_async(self.ring, self._batch.step())
        except Exception as error:
            self.error = error
            raise
        except BaseException:  # a signal; the launch has said so to the ring
            self.error = self.ring._health.unusable("send or recv")
            raise
        for work in self._works:
            work._works = done._works

    def _refuse(self) -> None:
        """Raise the reason why the calls can't be launched now, or not any more."""
        prefix = self.ring._describe("send or recv")
        if not self.place.capture:
            raise ArgumentError(
                f"{prefix}: issued before a CUDA graph capture, which must not record it; call "
                f"wait() before the capture begins"
            )
        error = ArgumentError(
            f"{prefix}: issued in a CUDA graph capture that is over, without a launch; call wait() "
            f"before the capture ends"
        )
        self._leave(error)
        raise error


_queues: dict[tuple[int, CommContext], _Queue] = {}  # by thread and ring


def queue(ring: CommContext, step: Step, source: int = -1, peer: int = -1) -> GroupWork:
    """Add a send or a receive to those that the calling thread launches together.

    An ``isend`` and an ``irecv`` that are launched one after the other would wait for each other on
    two GPUs. Calls from another stream, or in another capture, are another batch. So are those that
    use the memory of an earlier receive from their peer, or receive into that of a call with it.

    Args:
        ring: The ring.
        step: The send or the receive.
        source: The sender of a receive; -1 for a send.
        peer: The other rank.
    """
    context = place_of(ring)
    pending = _queues.get((get_ident(), ring))
    if pending is not None and not pending.takes(step, context, source, peer):
        pending.launch()
        pending = None
    work = None if pending is None else pending.add(step, source, peer)
    if work is None:
        work = _Queue(ring, context).add(step, source, peer)
    assert work is not None  # nobody else knows a new queue
    return work


def queued() -> bool:
    """Return True if any thread has calls that are not launched."""
    return bool(_queues)


def flush() -> None:
    """Launch what the calling thread has queued; every other call of a group does so first."""
    if _queues:
        thread = get_ident()
        for (owner, _), one in list(_queues.items()):
            if owner == thread:
                one.launch()


def drop(ring: CommContext) -> None:
    """Launch none of the calls that threads have queued on a ring; their works raise."""
    why = RingError(f"{ring._describe('send or recv')}: its group was aborted before the launch")
    for (_, on), one in list(_queues.items()):
        if on is ring:
            one.give_up(why)
