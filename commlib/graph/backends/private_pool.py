"""A private pool of torch's memory, which graphs are captured into."""

import torch


class PrivatePool:
    """A private pool, and a graph without memory that keeps it.

    Torch gives up a pool whose last graph is destroyed, and a later capture into it fails.

    Attributes:
        handle: Torch's handle.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Take a new pool; ``stream`` captures the graph, which is never launched."""
        self.handle = torch.cuda.graph_pool_handle()
        self._keeper = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(stream):
            word = torch.empty(1, device=stream.device)
            self._keeper.capture_begin(self.handle, capture_error_mode="thread_local")
            try:
                word.zero_()  # torch warns of a graph without nodes
            finally:
                self._keeper.capture_end()
