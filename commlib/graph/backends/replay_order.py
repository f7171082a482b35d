"""The order of replays: graphs share their memory, so they follow each other on any streams."""

from commlib.p2p.stream_order import StreamOrder
from commlib.streams import capture_of


class ReplayOrder(StreamOrder):
    """The stream of the last replay, and the fence to that of the next one.

    The backward that another thread captures may draw the stream of the last replay, a side stream,
    into its capture at any time. No replay waits for that stream then: that thread had waited for
    the GPU before the capture began. The caller holds the lock under which captures begin and end.
    """

    __slots__ = ()

    def _fence(self, stream: int, previous: int) -> None:
        last, event = self._stream(previous)
        event.record(last)
        if capture_of(previous) == capture_of(stream):  # else the event belongs to that capture
            self._wait(stream, event)
