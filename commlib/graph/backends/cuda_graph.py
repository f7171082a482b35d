"""One CUDA graph that is replayed, and when it may be destroyed: no capture survives that."""

import sys

import torch

from commlib.graph.watching.host import HostPart
from commlib.streams import capturing

under_way: list[object] = []  # the backends that capture now
_late: list[torch.cuda.CUDAGraph] = []  # graphs to be destroyed after that


class CudaRecording:
    """One CUDA graph, and what the host does before each launch of it."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, nodes: int, nbytes: int, host: HostPart
    ) -> None:
        self._graph, self.nodes, self.nbytes, self._host = graph, nodes, nbytes, host
        self.reads = host.reads
        if host.empty:
            self.replay = graph.replay  # type: ignore[method-assign]  # nothing between

    def replay(self) -> None:
        """Launch it on the current stream; never blocks."""
        self._host.run()
        self._graph.replay()
        if self._host.empty:  # but for what it did before the first launch
            self.replay = self._graph.replay  # type: ignore[method-assign]

    def release(self) -> None:
        """Destroy the graph; communicators that it uses must still be there."""
        if _busy():
            _late.append(self._graph)
        else:
            end_late()
            self._graph.reset()

    def __del__(self) -> None:
        if not sys.is_finalizing() and _busy():
            _late.append(self._graph)


def _busy() -> bool:
    """Whether something is being captured, by hand too: no capture survives a graph's end."""
    return bool(under_way) or capturing()


def end_late() -> None:
    """Destroy the graphs that were released during a capture."""
    while _late:
        _late.pop().reset()
