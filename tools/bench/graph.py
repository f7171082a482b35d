"""Calls in a CUDA graph, timed on all ranks: what a program that replays its steps pays."""

from collections.abc import Callable
from typing import Any

import torch

from commlib import CommContext

CALLS, REPLAYS = 20, 50  # calls in a graph, and replays in a row in a turn


class Captured:
    """A graph of ``CALLS`` calls in a row, and the tensor that they read."""

    def __init__(self, ring: CommContext, x: torch.Tensor, call: Callable[[], Any]) -> None:
        """Capture ``call``, which every rank has made before, and replay it once."""
        self.ring, self.x, self.graph = ring, x, torch.cuda.CUDAGraph()
        # Other threads of this process (NCCL's watchdog) may go on with what a capture forbids.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call()
        self.graph.replay()
        torch.cuda.synchronize()

    def turn(self) -> float:
        """Return the seconds of one call on the slowest rank.

        The ranks start together: after a barrier and one replay that is not timed.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Fresh values, never zeros. Calls in place add up to inf, then NaN, within a turn; as many
        # bytes move, so their speed is that of finite values or, if anything, better.
        self.x.normal_(std=0.01)
        self.ring.barrier()
        self.graph.replay()
        start.record()
        for _ in range(REPLAYS):
            self.graph.replay()
        end.record()
        end.synchronize()
        nanoseconds = round(start.elapsed_time(end) * 1e6)
        slowest = max(taken for (taken,) in self.ring.exchange([nanoseconds]))
        return slowest / 1e9 / (REPLAYS * CALLS)

    def close(self) -> None:
        """Free the graph; to be called before the communicator that its calls use is closed."""
        self.graph.reset()
