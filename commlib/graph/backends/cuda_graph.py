"""One CUDA graph that is replayed, and when it may be destroyed: no capture survives that."""

import sys

import torch

from commlib.errors import GraphError
from commlib.graph.backends.graph_memory import GraphMemory
from commlib.graph.watching.host import HostPart
from commlib.streams import capturing

under_way: list[object] = []  # the backends that capture now
_late: list[tuple[torch.cuda.CUDAGraph, GraphMemory | None]] = []  # to be destroyed after that


def check_single() -> None:
    """Raise ``GraphError`` if a capture is under way; the caller holds the lock of captures."""
    if under_way:
        raise GraphError(
            "a backward inside a capture needs a further graph, and torch captures one graph at a "
            "time; run that backward outside of captured functions"
        )


class CudaRecording:
    """One CUDA graph, and what the host does before each launch of it."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        nodes: int,
        nbytes: int,
        host: HostPart,
        memory: GraphMemory | None = None,
    ) -> None:
        """Store the graph; ``memory``: what it allocates itself (cudaMallocAsync)."""
        self._graph, self.nodes, self.nbytes, self._host = graph, nodes, nbytes, host
        self._memory, self._released = memory, False
        self.reads = host.reads
        if host.empty and memory is None:
            self.replay = graph.replay  # type: ignore[method-assign]  # nothing between

    def replay(self) -> None:
        """Launch it on the current stream; never blocks."""
        self._host.run()
        self._graph.replay()
        if self._memory is not None:
            self._memory.launch()
        if self._host.empty:  # but for what it did before the first launch
            self.replay = self._graph.replay  # type: ignore[method-assign]

    def release(self) -> None:
        """Destroy the graph, once; communicators that it uses must still be there."""
        if self._released:
            return
        self._released = True
        memory, self._memory = self._memory, None
        if _busy():
            _late.append((self._graph, memory))
        else:
            end_late()
            _destroy(self._graph, memory)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()


def _busy() -> bool:
    """Return True if any capture is under way: destroying a graph would break that capture."""
    return bool(under_way) or capturing()


def _destroy(graph: torch.cuda.CUDAGraph, memory: GraphMemory | None) -> None:
    if memory is None:
        graph.reset()
    elif memory.launched:  # else it stays for ever: its memory can't be freed
        torch.cuda.synchronize(memory.device)  # replays may use what is freed now
        graph.reset()


def end_late() -> None:
    """Destroy the graphs that were released during a capture."""
    while _late:
        _destroy(*_late.pop())
