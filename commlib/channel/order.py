"""The calls of one channel, one behind the other, whatever streams they come from."""

import torch

from commlib._streams import capture_of, current_raw


class StreamOrder:
    """Which stream had the last call, and the fence to the next one's.

    Outside captures, and inside one, calls on different streams are fenced here. A graph that is
    replayed beside other calls is for the program to order.
    """

    __slots__ = ("_device", "_tags", "last", "tag")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.last: int | None = None  # a handle; 0 is the default stream
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
        last, self.last = self.last, stream
        self.tag = self._tags.setdefault(stream, len(self._tags) + 1)
        if last is not None and capture_of(last) == capture_of(stream):
            event = torch.cuda.ExternalStream(last, self._device).record_event()
            torch.cuda.current_stream(self._device).wait_event(event)

    def stream_of(self, tag: int) -> str:
        """Return the handle of the stream with a number, for people."""
        return next((f"{stream:#x}" for stream, known in self._tags.items() if known == tag), "?")
