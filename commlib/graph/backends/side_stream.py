"""The side stream of a caller, to which the autograd nodes of captured calls belong."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from commlib.streams import current_raw, on_stream

_STREAMS = 32  # that torch deals out in turn


class SideStream:
    """A stream for the autograd nodes of the calls that one thread makes on one stream.

    A node belongs to the stream that is current when it is made. Torch up to 2.11 captures no
    backward that reaches a node of the default stream. Nodes of the capture stream would let a
    backward of another thread launch into a capture. So nodes of parameters belong to a side
    stream.

    Torch fences each gradient that passes from one stream to another, and records the use with the
    allocator: 0.6 ms for 75 gradients. So the node of a captured call belongs to the side stream
    too. Its graph runs on the caller's stream, between two fences.

    Gradients are allocated on the side stream. Each caller has its own: else memory that one caller
    frees could be used again while its kernels still read it.

    Torch warns, once, of a gradient that comes to a parameter from another stream. Here that is
    meant, and torch has one switch for all threads, so each side stream turns the warning off.
    """

    def __init__(self, stream: torch.cuda.Stream, *, shared: bool) -> None:
        """Make the side stream of the current thread and its current stream.

        ``shared``: whether another caller has the same stream, so that no captured call may use it.
        """
        self.stream, self._shared, self._thread = stream, shared, threading.get_ident()
        self._device: int = stream.device.index
        self._callers = torch.cuda.current_stream(stream.device)
        self._event, self._lock = torch.cuda.Event(), threading.Lock()
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    def serves(self) -> bool:
        """Return True if a call of the current thread on the current stream may use it."""
        same = current_raw(self._device) == self._callers.cuda_stream
        return same and threading.get_ident() == self._thread and not self._shared

    def orders(self, raw: int) -> bool:
        """Return True for the raw stream of either side of its fences."""
        return raw in (self.stream.cuda_stream, self._callers.cuda_stream)

    def current(self) -> AbstractContextManager[object]:
        """Return the context in which nodes of this stream are made."""
        return on_stream(self.stream)

    def run(self) -> AbstractContextManager[None]:
        """Run on this stream inside a ``with`` block, in the order of the caller's stream."""
        return _Across(self._fence, self._callers, self.stream)

    def run_on_callers(self) -> AbstractContextManager[None]:
        """Run on the caller's stream inside a ``with`` block, in the order of this one."""
        return _Across(self._fence, self.stream, self._callers)

    def _fence(self, first: torch.cuda.Stream, then: torch.cuda.Stream) -> None:
        with self._lock:  # one event for both directions
            self._event.record(first)
            self._event.wait(then)  # as then.wait_event(), with one function of Python less


class SideStreams:
    """The side streams of one GPU, by thread and stream of callers."""

    def __init__(self, rest: torch.cuda.Stream, *others: torch.cuda.Stream) -> None:
        """``rest`` serves those for whom no stream is left; ``others`` are in use as well."""
        self._rest, self._taken = rest, {stream.cuda_stream for stream in (rest, *others)}
        self._known: dict[tuple[int, int], SideStream] = {}
        self._lock = threading.Lock()

    def here(self) -> SideStream:
        """Return the side stream of this thread and its current stream."""
        key = threading.get_ident(), current_raw(self._rest.device.index)
        side = self._known.get(key)
        if side is None:
            with self._lock:
                side = self._known[key] = self._new(key[1])
        return side

    def all(self) -> list[SideStream]:
        """Return those of every thread."""
        with self._lock:
            return [*self._known.values()]

    def _new(self, callers: int) -> SideStream:
        """Make a side stream. Torch deals its streams in turn, so one may be in use already."""
        used = {*self._taken, callers, *(callers for _, callers in self._known)}
        used |= {side.stream.cuda_stream for side in self._known.values()}
        for _ in range(_STREAMS):
            stream = torch.cuda.Stream(self._rest.device)
            if stream.cuda_stream not in used:
                return SideStream(stream, shared=False)
        return SideStream(self._rest, shared=True)


class _Across:
    """Makes ``target`` the current stream, in the order of ``source``."""

    __slots__ = ("_fence", "_inner", "_source", "_target")

    def __init__(
        self,
        fence: Callable[[torch.cuda.Stream, torch.cuda.Stream], None],
        source: torch.cuda.Stream,
        target: torch.cuda.Stream,
    ) -> None:
        self._fence, self._source, self._target = fence, source, target
        self._inner = on_stream(target)

    def __enter__(self) -> None:
        self._fence(self._source, self._target)
        self._inner.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._inner.__exit__(*exc)
        self._fence(self._target, self._source)
