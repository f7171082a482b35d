"""An all_reduce in two halves, with other work of the stream in between."""

import torch

from commlib.deadlines import Deadline
from commlib.deferred import hold_until, release_deferred
from commlib.errors import CommTimeout
from commlib.p2p.push_channel import PushChannel
from commlib.p2p.push_collectives import SplitSteps
from commlib.rendezvous.identity import Health, RingIdentity
from commlib.streams import capture_of, is_permanent, issue_lock


class SplitAllReduce:
    """The second half of one call: launched by the first ``join``, on the joiner's stream."""

    def __init__(
        self,
        ring: RingIdentity,
        health: Health,
        channel: PushChannel,
        steps: SplitSteps,
        out: torch.Tensor,
        x: torch.Tensor,
    ) -> None:
        """Launch the first half on the current stream."""
        self._device, self._health, self._channel = ring.device, health, channel
        self._lock = issue_lock(ring.device)
        self._tensors: tuple[torch.Tensor, ...] = out, x
        self._end = steps.end
        self._origin = torch.cuda.current_stream(ring.device)
        self._permanent = is_permanent(self._origin)
        release_deferred()
        self._number = channel.open(steps.begin, out, x)
        self._event: torch.cuda.Event | None = None  # after the second half
        self._capture = 0  # which one that is part of

    def join(self, deadline: Deadline | None = None) -> None:
        """Launch what waits for the peers and reduces.

        A later join waits for the same launch. Raises what a call of the ring raises, and again at
        every join: the call has no result then. The host blocks only with a deadline.
        """
        with self._lock:
            stream = torch.cuda.current_stream(self._device)
            if self._event is None:
                self._finish(stream)
            elif capture_of(stream.cuda_stream) == self._capture:
                stream.wait_event(self._event)
        if deadline is not None and not deadline.poll(self.done):
            late = CommTimeout(f"did not finish within {deadline.seconds:g} s")
            raise self._health.failed("all_reduce", late)

    def _finish(self, stream: torch.cuda.Stream) -> None:
        health, event = self._health, torch.cuda.Event()
        if health.fault is not None:  # the channel may be gone
            raise health.unusable("all_reduce")
        try:
            self._channel.finish(self._number, self._end, *self._tensors)
        except Exception as error:
            raise health.failed("all_reduce", error) from error
        event.record(stream)
        self._capture = capture_of(stream.cuda_stream)
        origin = self._origin
        if not self._permanent:  # it may be gone by now
            if not self._capture:  # else the memory belongs to the graph
                hold_until(event, self._tensors)
        elif origin != stream and capture_of(origin.cuda_stream) == self._capture:
            origin.wait_event(event)  # the allocator reuses tensors in the order of their stream
        self._event, self._tensors = event, ()

    def done(self) -> bool:
        """Return True if the result is there: never before somebody has waited."""
        event = self._event
        return event is not None and (self._capture != 0 or event.query())
