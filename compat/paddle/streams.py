"""The legacy ways to order the current stream, the comm stream of a ring, and the host."""

from typing import TypeVar, overload

import torch

from commlib import flags, ops
from commlib.compat.paddle.checks import detached, ring_of
from commlib.core.context import CommContext
from commlib.core.group import needs_result
from commlib.deadlines import Deadline
from commlib.errors import CommTimeout
from commlib.ops.registered.library import needs_op, register
from commlib.streams import capturing

_LONGEST_SLEEP = 0.0002

Value = TypeVar("Value")


@overload
def barrier(x: None = None, ring_id: int = ...) -> None: ...
@overload
def barrier(x: torch.Tensor, ring_id: int = ...) -> torch.Tensor: ...


def barrier(x: torch.Tensor | None = None, ring_id: int = 0) -> torch.Tensor | None:
    """Hold the host until every rank of the ring has called ``barrier``.

    Source: operator ``barrier``. It runs on the current stream, for which the host then waits, at
    most for the ring's timeout. During a capture only the stream waits.

    Args:
        x: A tensor to sum, which is how upstream builds the barrier; on every rank or on none.
        ring_id: The ring.

    Returns:
        The sum of ``x`` over the ring, or None without ``x``.

    Raises:
        CommTimeout: Ranks are missing at the timeout.
        ArgumentError: The call is inside ``ring.group()``.
    """
    needs_result(ring_of("barrier", ring_id), "barrier")
    total: torch.Tensor | None = None if x is None else ops.all_reduce(detached(x), ring_id)
    if total is None or not total.numel():
        ops.barrier(ring_id)
    _order("barrier", ring_id)
    return total


@overload
def c_sync_calc_stream(x: None = None) -> None: ...
@overload
def c_sync_calc_stream(x: Value) -> Value: ...


def c_sync_calc_stream(x: object = None) -> object:
    """Hold the host until the current stream has finished its work.

    Source: operator ``c_sync_calc_stream``. Later raw calls see the results. It does nothing on a
    CPU, where the work has finished already, and nothing during a capture.

    Args:
        x: A tensor, several tensors, or nothing.

    Returns:
        ``x``, unchanged.

    Raises:
        CommTimeout: The stream is still busy after FLAGS_comm_timeout_s seconds.
    """
    _order("c_sync_calc_stream", 0)
    return x


@overload
def c_sync_comm_stream(x: None = None, ring_id: int = ...) -> None: ...
@overload
def c_sync_comm_stream(x: Value, ring_id: int = ...) -> Value: ...


def c_sync_comm_stream(x: object = None, ring_id: int = 0) -> object:
    """Hold the host until the ring's comm stream has finished its work.

    Source: operator ``c_sync_comm_stream``. The current stream waits for the comm stream too, and
    the tensors of raw calls are released. It does nothing on a CPU, where the work has finished
    already. During a capture only the streams wait.

    Args:
        x: A tensor, several tensors, or nothing.
        ring_id: The ring.

    Returns:
        ``x``, unchanged.

    Raises:
        CommTimeout: The comm stream is still busy after the ring's timeout.
    """
    _order("c_sync_comm_stream", ring_id)
    return x


@overload
def c_wait_compute(x: None = None, ring_id: int = ...) -> None: ...
@overload
def c_wait_compute(x: Value, ring_id: int = ...) -> Value: ...


def c_wait_compute(x: object = None, ring_id: int = 0) -> object:
    """Make the ring's comm stream wait for the work that is on the current stream now.

    Source: operator ``c_wait_compute``. The host does not wait. It does nothing on a CPU.

    Args:
        x: A tensor, several tensors, or nothing.
        ring_id: The ring.

    Returns:
        ``x``, unchanged.

    Raises:
        RingError: The ring does not exist.
    """
    _order("c_wait_compute", ring_id)
    return x


@overload
def c_wait_comm(x: None = None, ring_id: int = ...) -> None: ...
@overload
def c_wait_comm(x: Value, ring_id: int = ...) -> Value: ...


def c_wait_comm(x: object = None, ring_id: int = 0) -> object:
    """Make the current stream wait for the work that is on the ring's comm stream now.

    Source: operator ``c_wait_comm``. The host does not wait. The tensors of raw calls are
    released. It does nothing on a CPU.

    Args:
        x: A tensor, several tensors, or nothing.
        ring_id: The ring.

    Returns:
        ``x``, unchanged.

    Raises:
        RingError: The ring does not exist.
    """
    _order("c_wait_comm", ring_id)
    return x


def _order(step: str, ring_id: int) -> None:
    if needs_op():
        _twin(ring_id, step)
    else:
        _run(ring_id, step)


def _run(ring_id: int, step: str) -> None:
    if step == "c_sync_calc_stream":
        if torch.cuda.is_initialized() and not capturing():
            _hold(torch.cuda.current_stream(), flags.get(flags.TIMEOUT), step)
        return
    ring = ring_of(step, ring_id)
    calc = ring.stream_for(True)
    if ring._fences is None or ring.stream is None or calc is None:
        return
    if step == "c_wait_compute":
        with ring._lock:
            ring._fences.comm_waits(calc)
        return
    if step in ("c_wait_comm", "c_sync_comm_stream"):
        _join(ring, calc)
    if step in ("barrier", "c_sync_comm_stream") and not capturing():
        stream = calc if step == "barrier" else ring.stream
        _hold(stream, ring.timeout, f"{ring._describe(step)} of ranks {list(ring.ranks)}")


def _join(ring: CommContext, calc: torch.cuda.Stream) -> None:
    """Order ``calc`` after the comm stream, and release the tensors of raw calls."""
    with ring._lock:
        if capturing():
            with torch.cuda.stream(ring.stream):
                forked = capturing()
            if not forked:  # what the comm stream holds is not part of this capture
                return
        ring._fences.calc_waits(calc)  # type: ignore[union-attr]  # the caller has looked
        ring._unfenced.release()


def _hold(stream: torch.cuda.Stream, seconds: float, what: str) -> None:
    """Hold the host until ``stream`` has come this far, at most ``seconds``."""
    event = torch.cuda.Event()
    event.record(stream)
    if not Deadline(seconds).poll(event.query, _LONGEST_SLEEP):
        raise CommTimeout(
            f"{what}: the stream was still busy after {seconds:g} s; a collective on it may be "
            f"waiting for another rank; look there first, or raise FLAGS_comm_timeout_s"
        )


def _fake(ring_id: int, step: str) -> None:
    return None


_twin = register("paddle_order(int ring_id, str step) -> ()", _run, _fake)
