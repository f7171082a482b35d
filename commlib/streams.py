"""Current streams and captures, the fences between streams, and one issue lock per device."""

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from commlib.errors import EngineError

# NCCL requires that one thread at a time issues collectives on a device, over all communicators.
_issue_locks: defaultdict[torch.device, threading.RLock] = defaultdict(threading.RLock)
_permanent: set[int] = set()  # handles of the streams that ``new_stream`` has made


def _slow_current_raw(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# The handle of torch's current stream on a CUDA device. torch's own look-up builds no Stream
# object (0.1 µs instead of 0.7 µs). It is private, hence getattr.
current_raw: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _slow_current_raw
)


# torch's current stream of a device as (id, index, type of device), and its setter; both private.
# The setter makes the device of the stream the current one too.
_current: Callable[[int], tuple[int, int, int]] | None = getattr(
    torch._C, "_cuda_getCurrentStream", None
)
_set: Callable[[int, int, int], None] | None = getattr(torch._C, "_cuda_setStream", None)
_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)


class _OnStream:
    """Makes a stream and its device the current ones; torch's context takes 10 µs more."""

    __slots__ = ("_before", "_elsewhere", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream, index = self._stream, self._stream.device_index
        assert _current is not None and _set is not None and _device is not None
        device = _device()
        self._elsewhere = None if device == index else _current(device)
        self._before = _current(index)
        _set(stream.stream_id, index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        assert _set is not None
        _set(*self._before)
        if self._elsewhere is not None:
            _set(*self._elsewhere)


def on_stream(stream: torch.cuda.Stream) -> AbstractContextManager[object]:
    """Return a context in which ``stream`` is the current stream, and its device the current one.

    After it both are as before, as with ``torch.cuda.stream``.
    """
    if _current is None or _set is None or _device is None:
        return torch.cuda.stream(stream)
    return _OnStream(stream)


def issue_lock(device: torch.device) -> threading.RLock:
    """Return the lock under which collectives of ``device`` are launched."""
    return _issue_locks[device]


def forget() -> None:
    """Create new locks in a forked child: a thread of the parent may have held the old ones."""
    _issue_locks.clear()


# True if the driver captures the current stream. torch.cuda.is_current_stream_capturing gives the
# same answer in a capture and in the runs before it (graph/watching/capture_query.py).
stream_captures: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def capturing() -> bool:
    """Return True if the caller's current CUDA stream is being captured into a graph."""
    return torch.cuda.is_available() and bool(stream_captures())


query = threading.local()  # ``answer``: for programs that query whether they are captured


def sees_capture(tensor: torch.Tensor) -> bool:
    """Return True if a call on ``tensor`` is captured, also if a CPU recording captures it.

    Such a call must not read the tensor's values, because each replay has other ones.
    """
    if tensor.is_cuda:
        return bool(torch.cuda.is_current_stream_capturing())
    return bool(getattr(query, "answer", None))


def capture_of(stream: int) -> int:
    """Return the id of the capture that a stream (its handle) takes part in; 0 without one."""
    if stream == 0:  # the default stream can't be captured, nor queried during a capture
        return 0
    try:
        from cuda.bindings import driver
    except ImportError:  # torch.distributed does not need it: one id for all captures
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            return int(stream_captures())
    status, state, number = driver.cuStreamGetCaptureInfo(stream)[:3]
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return int(number) if int(status) == 0 and state == active else 0


def is_permanent(stream: torch.cuda.Stream) -> bool:
    """Return True if the stream exists as long as the process: torch or ``new_stream`` made it.

    Another library may destroy its stream at any time. The id of a foreign stream is its handle.
    """
    handle = stream.cuda_stream
    return bool(stream.stream_id != handle or handle == 0 or handle in _permanent)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that nobody else gets, ever: torch deals 32 streams in turn."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.synchronize()  # the driver needs this thread's context, which torch makes late
        status, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    if int(status) != 0:
        raise EngineError(f"cuStreamCreate: {status}")
    _permanent.add(int(stream))
    return torch.cuda.ExternalStream(int(stream), device)


class Fences:
    """The comm stream of one ring and the events that order it with the caller's stream.

    There is one event per direction. It is recorded and waited for in one step under the issue
    lock, so that it can be used again.
    """

    __slots__ = ("_calc", "_calc_id", "_comm_event", "_compute_event", "comm")

    def __init__(self, device: torch.device) -> None:
        self._calc = torch.cuda.current_stream(device)
        self._calc_id: tuple[int, int, int] | None = None
        highest = torch.cuda.Stream.priority_range()[1]  # type: ignore[call-arg]  # static
        self.comm = torch.cuda.Stream(device, priority=highest)
        self._compute_event = torch.cuda.Event()
        self._comm_event = torch.cuda.Event()

    def calc(self) -> torch.cuda.Stream:
        """Return the caller's current stream; the issue lock is held.

        It is the object of the last call where the stream is the same: a new one takes 2 µs.
        """
        stream_id = None if _current is None else _current(self.comm.device_index)
        if stream_id is None or stream_id != self._calc_id:
            self._calc, self._calc_id = torch.cuda.current_stream(self.comm.device), stream_id
        return self._calc

    def comm_waits(self, calc: torch.cuda.Stream) -> None:
        """Make the comm stream wait for the current work of ``calc``; the host does not block."""
        self._compute_event.record(calc)
        self.comm.wait_event(self._compute_event)

    def calc_waits(self, calc: torch.cuda.Stream) -> None:
        """Make ``calc`` wait for the current work of the comm stream; the host does not block."""
        self._comm_event.record(self.comm)
        calc.wait_event(self._comm_event)
