"""Measures what a call costs whose result the host has waited for."""

import time

import torch


class Stopwatch:
    """Counts from where the current stream has done what it was given before.

    The host may be many replays ahead of the GPU: waiting for these is not a cost of the call.
    """

    def __init__(self, device: torch.device) -> None:
        self._began, self._device = time.perf_counter(), device
        self._ready = self._recorded() if device.type == "cuda" else None

    def seconds(self) -> float:
        """Return the seconds so far; waits for the current stream."""
        if self._ready is None:
            return time.perf_counter() - self._began
        now = self._recorded()
        now.synchronize()
        return float(self._ready.elapsed_time(now)) / 1e3

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
