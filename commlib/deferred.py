"""Tensors of calls in flight, kept alive until nothing on a GPU uses them."""

from collections import deque

import torch

from commlib.streams import capture_of, stream_captures

# This holds tensors of calls whose Work was dropped while their stream was being captured. It also
# holds those of calls that a future waits for or that are on a stream of another library (None).
kept: deque[tuple[torch.cuda.Event, torch.cuda.Stream | None, object]] = deque()


def hold_until(event: torch.cuda.Event, tensors: object) -> None:
    """Keep tensors until an event has happened, whatever becomes of the stream they belong to."""
    kept.append((event, None, tensors))


def hold_until_captured(
    event: torch.cuda.Event, origin: torch.cuda.Stream, tensors: object
) -> None:
    """Keep tensors until their stream, which is being captured, may wait for an event."""
    kept.append((event, origin, tensors))


def release_deferred() -> None:
    """Release tensors that nothing uses any more; in a capture, do nothing.

    Collectives of all kinds do it: a program may go on with other kinds than that of the kept call.
    """
    if not kept or stream_captures():
        return
    for _ in range(len(kept)):
        try:
            event, origin, tensors = kept.popleft()
        except IndexError:  # another thread has taken it
            return
        if not event.query() if origin is None else capture_of(origin.cuda_stream):
            kept.append((event, origin, tensors))
        elif origin is not None:
            event.wait(origin)


class UnfencedCalls:
    """Tensors of calls that run on a ring's comm stream without a fence."""

    def __init__(self) -> None:
        self._calls: deque[tuple[torch.cuda.Event, object]] = deque()

    def keep(self, event: torch.cuda.Event, calls: object) -> None:
        """Keep a call's tensors until ``event`` has happened, or ``release()``."""
        while self._calls and self._calls[0][0].query():
            self._calls.popleft()
        self._calls.append((event, calls))

    def release(self) -> None:
        """Release all tensors; the program has just synchronised the stream."""
        self._calls.clear()
