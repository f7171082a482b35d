"""The stream beside a caller's one, to which the autograd nodes of captured calls belong."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from commlib._streams import current_raw


class SideStream:
    """A stream for the autograd nodes of one thread's calls on one stream.

    A node belongs to the stream that is current when it is made. Beside nodes of the default stream
    torch up to 2.11 captures no backward; those of the stream of captures would let a backward of
    another thread run into whatever is being captured. So the nodes of leaves belong to this one.

    Torch fences each gradient that goes from one stream to another, and notes the use with the
    allocator: 0.6 ms for 75 gradients. So the node of a captured call belongs here too. Its graph
    runs on the caller's stream, between two fences.

    Gradients lie in memory of this stream. What a caller frees is given to no other caller, whose
    kernels would not be ordered behind those that still read it.
    """

    def __init__(self, device: torch.device) -> None:
        """Make one for the current thread and its current stream."""
        self._device, self._thread = device.index, threading.get_ident()
        self._callers, self.stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        self._event = torch.cuda.Event()

    def is_beside(self) -> bool:
        """Return True if the current thread and stream are those that it was made for."""
        same = current_raw(self._device) == self._callers.cuda_stream
        return same and threading.get_ident() == self._thread

    def current(self) -> AbstractContextManager[object]:
        """Return the context in which nodes of this stream are made."""
        return torch.cuda.stream(self.stream)

    def run(self) -> AbstractContextManager[None]:
        """Run on this stream inside a ``with`` block, in the order of the caller's stream."""
        return self._across(self._callers, self.stream)

    def run_on_callers(self) -> AbstractContextManager[None]:
        """Run on the caller's stream inside a ``with`` block, in the order of this one."""
        return self._across(self.stream, self._callers)

    @contextmanager
    def _across(self, here: torch.cuda.Stream, there: torch.cuda.Stream) -> Iterator[None]:
        self._fence(here, there)
        try:
            with torch.cuda.stream(there):
                yield
        finally:
            self._fence(there, here)

    def _fence(self, before: torch.cuda.Stream, behind: torch.cuda.Stream) -> None:
        self._event.record(before)
        behind.wait_event(self._event)
