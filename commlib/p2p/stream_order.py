"""Calls that share something, one after the other, on any streams."""

import torch

from commlib.streams import capture_of, current_raw, is_permanent


class StreamOrder:
    """The stream of the last call, and the fence to the stream of the next one.

    Calls on different streams are fenced here, outside captures and inside one. The program orders
    a graph that is replayed at the same time as other calls.
    """

    __slots__ = ("_captured", "_device", "_eager", "_ended", "_known", "_tags", "foreign", "last",
                 "tag")  # fmt: skip

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Stream of the last call, a handle; 0 is the default stream. None after a captured call:
        # whether a stream is captured is asked where it changes, so the next call has to ask.
        self.last: int | None = None
        self._eager: int | None = None  # stream of the last call outside captures
        self._captured: tuple[int, int | None] = 0, None  # a capture, and its last call's stream
        self._known: dict[int, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
        self._tags: dict[int, int] = {}
        self._ended: dict[int, torch.cuda.Event] = {}  # by foreign stream: after its last call
        self.foreign = False  # True if another library made the last call's stream
        self.tag = 0  # number of the last call's stream, from 1 on

    def turn(self) -> int:
        """Return the handle of the current stream, ordered after the last call."""
        stream = current_raw(self._device.index)
        if stream != self.last:
            self.switch_stream(stream)
        return stream

    def switch_stream(self, stream: int) -> None:
        """Order the current stream, which this handle names, after the last call."""
        capture, prior = capture_of(stream), 0 if self.last is None else capture_of(self.last)
        self.foreign = not capture and not self._permanent()
        if prior:  # its capture has begun since, and may hold calls that came the short way
            self._captured = prior, self.last
        if capture:
            number, previous = self._captured
            previous = previous if number == capture else None
            self._captured, self.last = (capture, stream), None
        else:
            previous, self._eager = self._eager, stream
            # A foreign stream may be gone at the next call, and another one may have its handle.
            self.last = None if self.foreign else stream
        self.tag = self._tags.setdefault(stream, len(self._tags) + 1)
        if not capture and previous in self._ended:
            self._wait(stream, self._ended[previous])
        elif previous is not None and previous != stream and capture_of(previous) == capture:
            self._fence(stream, previous)

    def ended(self, stream: int) -> None:
        """Record where a call on a foreign stream ends, while that stream certainly exists."""
        event = self._ended.setdefault(stream, torch.cuda.Event())
        event.record(self._stream(stream)[0])

    def _permanent(self) -> bool:
        return is_permanent(torch.cuda.current_stream(self._device))

    def _fence(self, stream: int, previous: int) -> None:
        last, event = self._stream(previous)
        event.record(last)
        self._wait(stream, event)

    def _wait(self, stream: int, event: torch.cuda.Event) -> None:
        self._stream(stream)[0].wait_event(event)

    def _stream(self, handle: int) -> tuple[torch.cuda.Stream, torch.cuda.Event]:
        """Return a stream and its event, kept since programs go to and fro between two."""
        if handle not in self._known:
            # torch takes the default stream's handle, 0, for "give me a new stream".
            default = torch.cuda.default_stream(self._device)
            stream = torch.cuda.ExternalStream(handle, self._device) if handle else default
            self._known[handle] = stream, torch.cuda.Event()
        return self._known[handle]

    def stream_of(self, tag: int) -> str:
        """Return the handle of the stream with a number, for people."""
        return next((f"{stream:#x}" for stream, number in self._tags.items() if number == tag), "?")
