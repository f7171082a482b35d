"""An all_reduce in two halves, with other work of the stream between them."""

import threading

import torch

from commlib.custom_allreduce.push import PushChannel, Step


class Split:
    """The second half of one call: launched by the first ``join``, on the joiner's stream."""

    def __init__(
        self, channel: PushChannel, end: Step, lock: threading.RLock, *tensors: torch.Tensor
    ) -> None:
        self._channel, self._lock, self._tensors = channel, lock, tensors
        self._end: Step | None = end
        self._event: torch.cuda.Event | None = None

    def join(self) -> None:
        """Launch what waits for the peers and reduces; the host does not block."""
        with self._lock:
            if self._end is None:
                return
            end, self._end = self._end, None
            self._channel.finish(end, *self._tensors)
            if not torch.cuda.is_current_stream_capturing():
                self._event = torch.cuda.Event()
                self._event.record()

    def done(self) -> bool:
        """Whether the result is there: never before somebody has waited."""
        return self._end is None and (self._event is None or self._event.query())
