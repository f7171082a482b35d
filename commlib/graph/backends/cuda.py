"""The CUDA backend: one pool and one capture stream a device, for every graph of the process."""

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from typing import NamedTuple

import torch

from commlib.core import observers
from commlib.core.ring import Ring
from commlib.core.work import Work
from commlib.errors import GraphError
from commlib.graph.backends.base import Pool
from commlib.graph.backends.blas_workspace import BlasWorkspace
from commlib.graph.backends.cached_memory import trim_after_backward, trimmed
from commlib.graph.backends.capture_lock import CaptureLock
from commlib.graph.backends.cuda_driver import clear_error, no_stale_streams, nodes, unsafe_calls
from commlib.graph.backends.cuda_graph import CudaRecording, check_single, end_late, under_way
from commlib.graph.backends.graph_memory import Failures, allocated_bytes, join_frees, memory_of
from commlib.graph.backends.private_pool import PrivatePool
from commlib.graph.backends.replay_order import ReplayOrder
from commlib.graph.backends.side_stream import SideStream, SideStreams
from commlib.graph.operators.generators import put_state
from commlib.graph.watching.garbage import no_collection
from commlib.graph.watching.host import HostPart
from commlib.graph.watching.recorder import Recorder
from commlib.streams import capture_of, new_stream

_capturing, _making = CaptureLock(), threading.Lock()
_failures = Failures()


class _Capture(NamedTuple):
    """A capture under way."""

    graph: torch.cuda.CUDAGraph
    pool: Pool
    held: int  # bytes that torch had taken from the GPU before
    random: torch.Tensor  # state of torch's own generator before
    number: int  # as the driver counts captures
    recorder: Recorder
    works: list[Work]  # that the function has begun
    watching: ExitStack  # the recorder's
    scope: ExitStack  # streams and locks


def of_gpu(index: int) -> "CudaBackend":
    """Return the backend of GPU ``index``, the same one to all threads."""
    with _making:
        return _backend_of(index)


@cache
def _backend_of(index: int) -> "CudaBackend":
    return CudaBackend(torch.device("cuda", index))


class CudaBackend:
    """Captures on one GPU, with the calling thread's work alone in the capture."""

    copies_arguments = False  # until one comes from somewhere else
    captures_run = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self._now: _Capture | None = None
        self._failed = self._failed_since = False  # a capture has: ever, and since a collection
        self._order = ReplayOrder(device)
        with torch.cuda.device(device):
            self._warm, self._rooms = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._sides = SideStreams(self._rooms, self._warm)
            self.stream = new_stream(device)  # of captures: nothing runs eagerly on it
            self._workspace = BlasWorkspace(device, self.stream)
            self._pool = PrivatePool(self.stream)  # of all graphs without a separate one
            self._take_turn()

    # -- before a capture --------------------------------------------------------------------------

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Run on a separate stream, with its memory and workspace: replays may use the graphs'.

        What the function keeps from here, such as an optimizer's state, must not be in the pool.
        """
        current = torch.cuda.current_stream(self.device)
        with _capturing, no_collection():
            self._warm.wait_stream(current)
            with torch.cuda.stream(self._warm):
                yield
            current.wait_stream(self._warm)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Make a call whose autograd nodes stay: on the side stream."""
        with _capturing, self._sides.here().run():
            yield

    def trimmed(self) -> AbstractContextManager[None]:
        """Give back what torch has taken inside a ``with`` block."""
        return trimmed(self.device, _capturing)

    def trim_after_backward(self, outs: Sequence[torch.Tensor]) -> None:
        """Give back what the first backward of a call has taken, once it has ended."""
        trim_after_backward(outs, _capturing)

    # -- a capture ---------------------------------------------------------------------------------

    def own_pool(self) -> Pool:
        """Return a pool for graphs that keep something from one replay to the next.

        In the shared one, what a graph leaves is gone when one with the same memory is replayed.
        """
        with _capturing, no_collection():
            check_single()
            torch.cuda.synchronize(self.device)  # a capture writes where replays read
            with self.lock:  # as in ``begin``
                self._take_turn()
                return PrivatePool(self.stream)

    def turn(self) -> None:
        """Order the current stream after the last replay: graphs share their memory."""
        with self.lock:
            self._order.turn()

    def side(self) -> SideStream:
        """Return the side stream of this thread and its current stream."""
        return self._sides.here()

    def waiting(self) -> AbstractContextManager[object]:
        """Return the context to make autograd nodes in that outlive a capture."""
        self._collect(everything=self._failed)
        return self._sides.here().current()

    def _collect(self, *, everything: bool) -> None:
        """Release autograd nodes in reference cycles, which a failed capture leaves.

        They belong to another stream, and a leaf whose node is still there gets no new one. After
        a failure each captured call searches all garbage once: 0.2 s in a large program.
        """
        gc.collect(2 if everything else 1)
        self._failed_since = self._failed_since and not everything

    def begin(
        self, generators: Sequence[torch.Generator] = (), pool: Pool | None = None
    ) -> Recorder:
        """Begin a capture on the capture stream; garbage collection waits until its end.

        ``generators`` are those that it draws from in addition to torch's own.
        """
        with ExitStack() as scope:
            scope.enter_context(_capturing)
            check_single()
            _failures.check()
            self._collect(everything=self._failed_since)
            scope.enter_context(no_collection())
            scope.enter_context(torch.cuda.stream(self.stream))
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # of what the runs before had on their stream
            self._workspace.take()
            end_late()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            pool_handle = (pool or self._pool).handle
            for generator in generators:
                graph.register_generator_state(generator)
            random = torch.cuda.default_generators[self.device.index].get_state()
            scope.enter_context(no_stale_streams())
            held = torch.cuda.memory_reserved(self.device)
            with self.lock:  # the replay of another thread may be about to wait for this stream
                graph.capture_begin(pool_handle, capture_error_mode="thread_local")
            under_way.append(self)
            recorder, watching = Recorder(self.device, host=HostPart(self._room)), ExitStack()
            number = capture_of(self.stream.cuda_stream)
            works = watching.enter_context(observers.unwaited())
            self._now = _Capture(
                graph, pool_handle, held, random, number, recorder, works, watching, scope.pop_all()
            )
        return watching.enter_context(recorder)

    def end(self) -> CudaRecording:
        """End the capture. Raises ``GraphError`` for one that holds nothing."""
        now = self._now
        assert now is not None
        now.watching.close()
        for work in now.works:  # the second half of a split call, where nobody has asked for it
            work.wait()
        self._join_all(now)
        now.recorder.end_host()
        memory = memory_of(now.graph, self.device, now.recorder.memory.made.values())
        with self.lock:
            now.graph.capture_end()
        self._leave()
        now.recorder.restore()  # what the host has done
        count, launches = nodes(now.graph), now.recorder.launches
        if count == 0 and (launches or now.recorder.collectives):
            raise GraphError(
                f"the graph is empty though {launches} operators ran: they went to a stream that "
                f"is not part of the capture; launch on the current stream, or on one that waits "
                f"for it"
            )
        now.graph.instantiate()
        assert now.recorder.host is not None
        grown = torch.cuda.memory_reserved(self.device) - now.held
        taken = max(grown, 0) if memory is None else allocated_bytes(now.graph)
        return CudaRecording(now.graph, count, taken, now.recorder.host, memory)

    def _room(self, source: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor of the host, outside the pool: replays write the pool."""
        with unsafe_calls(), torch.cuda.stream(self._rooms):
            return torch.empty_like(source, device=self.device)

    def _join_all(self, now: _Capture) -> None:
        """Order the capture stream after all streams that have become a part of its capture."""
        self.join(now.recorder.rings)
        capture = capture_of(self.stream.cuda_stream)
        for side in self._sides.all():
            if capture_of(side.stream.cuda_stream) == capture:  # a backward has met nodes of leaves
                self.stream.wait_stream(side.stream)
        join_frees(self.device.index, now.pool)

    def join(self, rings: Sequence[Ring]) -> None:
        """Order the current stream after the comm streams of rings that belong to its capture."""
        current = torch.cuda.current_stream(self.device)
        capture = capture_of(current.cuda_stream)
        for ring in rings:
            fences = ring._fences
            if fences is None:
                continue
            with ring._lock:
                if capture_of(fences.comm.cuda_stream) == capture:
                    fences.calc_waits(current)

    def _leave(self) -> None:
        if self._now is not None:
            now, self._now = self._now, None
            under_way.remove(self)
            with now.scope:
                end_late()
                self._take_turn()  # before another thread captures on this stream

    def _take_turn(self) -> None:
        """Order the next replay after what the last capture has written when it began.

        Torch keeps the generator offset of all graphs in one GPU tensor. A replay sets it to its
        own value, and the begin of a capture sets it to 0.
        """
        with torch.cuda.stream(self.stream):
            self.turn()

    def fail(self) -> None:
        """Abandon a capture after an exception, and restore the state from before it.

        Torch up to 2.13 leaves the allocator, the generators and the current stream in the capture
        when it ends with an error.
        """
        now = self._now
        if now is None:
            return
        self._failed = self._failed_since = True
        now.watching.close()
        for ring in now.recorder.rings:
            ring._engine.abandon(now.number)
        memory = memory_of(now.graph, self.device, now.recorder.memory.made.values())
        if memory is not None:  # the error may hold tensors of it, and torch can't repair anything
            with suppress(RuntimeError):
                self._join_all(now)
        try:
            with self.lock:
                now.graph.capture_end()
            if memory is None:
                now.graph.reset()
        except RuntimeError:
            self._repair(now)
        finally:
            try:
                self._leave()
            finally:
                now.recorder.restore()

    def _repair(self, now: "_Capture") -> None:
        """Do what ``capture_end`` has left out; the pool is not used again."""
        _failures.note()
        index = self.device.index
        for step in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with suppress(RuntimeError):  # newer torch has done it
                getattr(torch._C, step)(index, now.pool)
        clear_error()
        with self.lock:
            self._pool = PrivatePool(self.stream)  # a capture that ends well frees the generators
        put_state(torch.cuda.default_generators[index], now.random)
