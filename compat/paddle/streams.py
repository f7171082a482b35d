"""The legacy ways to order the current stream, the comm stream of a ring, and the host."""

from typing import Any

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


def barrier(x: torch.Tensor | None = None, ring_id: int = 0) -> torch.Tensor | None:
    """Hold the host of this rank until every rank of the ring has come here.

    With ``x``, on every rank or on none, returns its sum over the ring, which is how upstream
    builds the barrier. On the current stream; then the host waits for it, at most for the ring's
    timeout (in a capture only the stream waits). Raises ``CommTimeout``, ``ArgumentError`` inside
    ``ring.group()``. Source: operator ``barrier``.
    """
    needs_result(ring_of("barrier", ring_id), "barrier")
    total: torch.Tensor | None = None if x is None else ops.all_reduce(detached(x), ring_id)
    if total is None or not total.numel():
        ops.barrier(ring_id)
    _order("barrier", ring_id)
    return total


def c_sync_calc_stream(x: Any = None) -> Any:
    """Hold the host until the current stream has done what it was given; return ``x`` as it is.

    Raw calls that follow see its results. Does nothing on a CPU, where results are there already,
    and in a capture. Raises ``CommTimeout`` after FLAGS_comm_timeout_s. Source: operator
    ``c_sync_calc_stream``.
    """
    _order("c_sync_calc_stream", 0)
    return x


def c_sync_comm_stream(x: Any = None, ring_id: int = 0) -> Any:
    """Hold the host until the ring's comm stream has done what it was given; return ``x`` as it is.

    ``x``: a tensor, several, or nothing. The current stream is ordered after it too, and the
    tensors of raw calls are released. Does nothing on a CPU, where results are there already; in a
    capture only the streams are ordered. Raises ``CommTimeout`` after the ring's timeout. Source:
    operator ``c_sync_comm_stream``.
    """
    _order("c_sync_comm_stream", ring_id)
    return x


def c_wait_compute(x: Any = None, ring_id: int = 0) -> Any:
    """Order the ring's comm stream after what the current stream holds now; return ``x`` as it is.

    The host does not wait. Does nothing on a CPU. Source: operator ``c_wait_compute``.
    """
    _order("c_wait_compute", ring_id)
    return x


def c_wait_comm(x: Any = None, ring_id: int = 0) -> Any:
    """Order the current stream after what the ring's comm stream holds now; return ``x`` as it is.

    The host does not wait. The tensors of raw calls are released. Does nothing on a CPU. Source:
    operator ``c_wait_comm``; each direction has its own event.
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
