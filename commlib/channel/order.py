"""Calls that share something, one behind the other, whatever streams they come from."""

from functools import cache

import torch

from commlib._streams import capture_of, current_raw


@cache
def pushes(device: torch.device) -> "StreamOrder":
    """Return the order of all push kernels of a device, those of every ring.

    A large one fills the GPU until its peers come. Two rings that ran at the same time could each
    hold one rank's GPU and wait for the other's; in the order of the program they can't.
    """
    return StreamOrder(device)


class StreamOrder:
    """Which stream had the last call, and the fence to the next one's.

    Outside captures, and inside one, calls on different streams are fenced here. A graph that is
    replayed beside other calls is for the program to order.
    """

    __slots__ = ("_captured", "_device", "_eager", "_known", "_tags", "last", "tag")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Stream of the last call, a handle; 0 is the default stream. None behind a captured call:
        # whether a stream is captured is asked where it changes, so the next call has to ask.
        self.last: int | None = None
        self._eager: int | None = None  # stream of the last call outside captures
        self._captured: tuple[int, int | None] = 0, None  # a capture, and its last call's stream
        self._known: dict[int, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
        self._tags: dict[int, int] = {}
        self.tag = 0  # number of the last call's stream, from 1 on

    def turn(self) -> int:
        """Return the handle of the current stream, ordered behind the last call."""
        stream = current_raw(self._device.index)
        if stream != self.last:
            self.change_to(stream)
        return stream

    def change_to(self, stream: int) -> None:
        """Order the current stream, which this handle names, behind the last call."""
        here, there = capture_of(stream), 0 if self.last is None else capture_of(self.last)
        if there:  # its capture has begun since, and may hold calls that came the short way
            self._captured = there, self.last
        if here:
            number, behind = self._captured
            behind = behind if number == here else None
            self._captured, self.last = (here, stream), None
        else:
            behind, self._eager, self.last = self._eager, stream, stream
        self.tag = self._tags.setdefault(stream, len(self._tags) + 1)
        if behind is not None and behind != stream and capture_of(behind) == here:
            self._fence(stream, behind)

    def _fence(self, stream: int, behind: int) -> None:
        last, event = self._stream(behind)
        event.record(last)
        self._stream(stream)[0].wait_event(event)

    def _stream(self, handle: int) -> tuple[torch.cuda.Stream, torch.cuda.Event]:
        """Return a stream and its event, kept since programs go to and fro between two."""
        if handle not in self._known:
            # torch takes the default stream's handle, 0, for "give me a new stream".
            default = torch.cuda.default_stream(self._device)
            found = torch.cuda.ExternalStream(handle, self._device) if handle else default
            self._known[handle] = found, torch.cuda.Event()
        return self._known[handle]

    def stream_of(self, tag: int) -> str:
        """Return the handle of the stream with a number, for people."""
        return next((f"{stream:#x}" for stream, known in self._tags.items() if known == tag), "?")
