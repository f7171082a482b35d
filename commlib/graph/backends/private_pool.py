"""A private pool of torch's memory, which graphs are captured into."""

from contextlib import AbstractContextManager

import torch


class PrivatePool:
    """A private pool, and a graph without memory that keeps it.

    Torch gives up a pool whose last graph is destroyed, and a later capture into it fails.

    Attributes:
        handle: Torch's handle.
    """

    def __init__(self, stream: torch.cuda.Stream, lock: AbstractContextManager[object]) -> None:
        """Take a new pool; ``stream`` captures the graph, which is never launched.

        ``lock``: in it no replay of another thread is about to wait for the stream.
        """
        self.handle = torch.cuda.graph_pool_handle()
        self._keeper = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(stream):
            word = torch.empty(1, device=stream.device)
            with lock:
                self._keeper.capture_begin(self.handle, capture_error_mode="thread_local")
                word.zero_()  # torch warns of a graph without nodes
                self._keeper.capture_end()
