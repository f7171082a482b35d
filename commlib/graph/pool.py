"""The CUDA engine: one pool and one capture stream a device, for every graph of the process."""

import ctypes
import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from commlib._streams import capture_of
from commlib.channel.order import StreamOrder
from commlib.errors import GraphError
from commlib.graph.engine import Pool
from commlib.graph.ledger import Ledger

_capturing = threading.RLock()  # torch captures one graph at a time


class CudaRecording:
    """One CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, nodes: int) -> None:
        self._graph, self.nodes = graph, nodes
        self.replay = graph.replay  # on the current stream; never blocks

    def release(self) -> None:
        """Destroy the graph; communicators that it uses must still be there."""
        self._graph.reset()


@cache
def engine(index: int) -> "CudaEngine":
    """Return the engine of GPU ``index``."""
    return CudaEngine(torch.device("cuda", index))


class CudaEngine:
    """Captures on one GPU, with the calling thread's work alone in the capture."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ledger: Ledger | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._scope: ExitStack | None = None
        self._order = StreamOrder(device)
        self._random: torch.Tensor | None = None  # state of the default generator before a capture
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device)
            self._renew()

    def _renew(self) -> None:
        """Take a new pool, and an empty graph that keeps it alive."""
        self.pool = torch.cuda.graph_pool_handle()
        self._keeper = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self._keeper.capture_begin(self.pool, capture_error_mode="thread_local")
            torch.empty(1, device=self.device).zero_()
            self._keeper.capture_end()

    # -- before a capture --------------------------------------------------------------------------

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Run on the capture stream, with memory of its own.

        What the function keeps from here, such as an optimizer's state, must not lie in the pool:
        a graph that was captured before may write there.
        """
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with _capturing, torch.cuda.stream(self.stream):
            yield
        here.wait_stream(self.stream)

    # -- a capture ---------------------------------------------------------------------------------

    def own_pool(self) -> Pool:
        """Return a pool for graphs that keep something from one replay to the next.

        In the shared one a graph's memory may be another's that was captured before it: what it
        leaves there is gone when that one is replayed.
        """
        return torch.cuda.graph_pool_handle()

    def turn(self) -> None:
        """Order the current stream behind the last replay: graphs share their memory."""
        self._order.turn()

    def begin(self, generators: Sequence[torch.Generator] = (), pool: Pool | None = None) -> Ledger:
        """Begin a capture on the capture stream; garbage collection waits until its end.

        ``generators`` are those that it draws from beside torch's own.
        """
        torch.cuda.synchronize(self.device)
        gc.collect()  # a graph that dies in mid capture would break it
        scope = ExitStack()
        scope.enter_context(_capturing)
        scope.enter_context(_no_collection())
        scope.enter_context(torch.cuda.stream(self.stream))
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._ledger = Ledger(self.device).in_capture()
        for generator in generators:
            self._graph.register_generator_state(generator)
        self._random = torch.cuda.default_generators[self.device.index].get_state()
        try:
            self._now = self.pool if pool is None else pool
            self._graph.capture_begin(self._now, capture_error_mode="thread_local")
        except BaseException:
            scope.close()
            raise
        self._scope = scope
        return self._ledger.__enter__()

    def end(self) -> CudaRecording:
        """End the capture. Raises ``GraphError`` for one that holds nothing."""
        graph = self._graph
        assert graph is not None and self._ledger is not None and self._scope is not None
        self._ledger.__exit__(None, None, None)
        self._join(self._ledger)
        graph.capture_end()
        names, collectives = self._ledger.names, self._ledger.collectives
        self._leave()
        nodes = _nodes(graph)
        if nodes == 0 and (names or collectives):
            raise GraphError(
                f"the graph is empty though {len(names)} operators ran: they went to a stream that "
                f"is no part of the capture; launch on the current stream, or on one that waits "
                f"for it"
            )
        graph.instantiate()
        return CudaRecording(graph, nodes)

    def _join(self, ledger: Ledger) -> None:
        """Let the capture wait for the comm streams that it has forked to."""
        own = capture_of(self.stream.cuda_stream)
        for ring in ledger.rings:
            fences = ring.fences
            if fences is not None and capture_of(fences.comm.cuda_stream) == own:
                fences.calc_waits(self.stream)

    def _leave(self) -> None:
        scope, self._scope, self._graph, self._ledger = self._scope, None, None, None
        if scope is not None:
            scope.close()

    def fail(self) -> None:
        """Give up a capture that an exception has left, so that the process is as before it.

        Torch up to 2.13 leaves the allocator, the generators and the current stream in the capture
        when it ends with an error.
        """
        if self._ledger is not None:
            self._ledger.__exit__(None, None, None)
        graph = self._graph
        try:
            if graph is not None:
                graph.capture_end()
                graph.reset()
        except RuntimeError:
            self._repair()
        finally:
            self._leave()

    def _repair(self) -> None:
        """Do what ``capture_end`` has left out; the pool is not used again."""
        index = self.device.index
        for step in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with suppress(RuntimeError):  # newer torch has done it
                getattr(torch._C, step)(index, self._now)
        _clear_error()
        generator, state = torch.cuda.default_generators[index], self._random
        self._renew()  # a capture that ends well frees the generators
        if state is not None:
            generator.set_state(state)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hold garbage collection off: it could destroy a graph, which no capture survives."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _nodes(graph: torch.cuda.CUDAGraph) -> int:
    from cuda.bindings import driver

    status, _, count = driver.cuGraphGetNodes(graph.raw_cuda_graph(), 0)[:3]
    if int(status) != 0:
        raise GraphError(f"cuGraphGetNodes: {status}")
    return int(count)


def _clear_error() -> None:
    """Take the last error from the runtime library that torch uses; it is not a lasting one."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in sorted({line.split()[-1] for line in maps if "libcudart.so" in line}):
        ctypes.CDLL(path).cudaGetLastError()
