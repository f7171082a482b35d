"""Launches of calls that need more than their launch: staging, fences, a Work, several as one."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from commlib import flags
from commlib.core.calls.call import Call, Launch, Result
from commlib.core.observers import begun
from commlib.core.ring import Ring
from commlib.core.stream_mode import StreamMode
from commlib.core.work import AllOf, OnHost, OnStream, Work
from commlib.deadlines import Deadline
from commlib.deferred import release_deferred
from commlib.engines.base import Unconnected
from commlib.errors import CommError, PeerTimeout, StreamError
from commlib.streams import Fences, capture_of, on_stream, stream_captures
from commlib.waits import OVER

Tensor = torch.Tensor

_NO_LIMIT = nullcontext()


def launch(
    ring: Ring, calls: list[Call[Any]], result: Result, mode: StreamMode, grouped: bool
) -> Result | Work:
    """Launch ``calls`` as one operation; return ``result``, or a Work where one is unfinished."""
    use_calc_stream, sync_op, fenced, blocks, seconds = mode
    fences = ring._fences
    release_deferred()
    if fences is None:
        with nullcontext() if seconds is None else ring._engine.limited(seconds):
            handles = _start(ring, calls, grouped)
        parts = [_on_host(ring, *each, seconds) for each in zip(calls, handles, strict=True)]
        return begun(Work(result, AllOf(parts) if grouped else parts[0]))
    late = partial(_late, ring, calls)
    if use_calc_stream:
        with ring._engine.bounded(blocks) if blocks else _NO_LIMIT:
            _on_stream(ring, calls, grouped)
        return result
    calc = fences.calc()
    capturing = stream_captures()
    # Without a fence the comm stream would run outside a capture, once, and never at a replay.
    fenced = fenced or capturing
    if fenced:
        fences.comm_waits(calc)
    if not (sync_op and fenced):  # the program's own kernels run at the same time
        blocks = blocks or flags.get(flags.ASYNC_BLOCKS)
    limit = ring._engine.bounded(blocks) if blocks else _NO_LIMIT
    with on_stream(fences.comm), limit:
        _on_stream(ring, calls, grouped)
    if fenced and sync_op:
        fences.calc_waits(calc)
        return result
    event = torch.cuda.Event()
    event.record(fences.comm)
    capture = capture_of(calc.cuda_stream) if capturing else 0
    work = begun(Work(result, OnStream(event, calc, calls, capture, late)))
    if sync_op:
        ring._unfenced.keep(event, calls)
        return result
    return work


def on_comm_stream(
    fences: Fences, launch: Launch, out: Tensor | None, x: Tensor | None, args: tuple[Any, ...]
) -> None:
    """Launch a dense call on the comm stream, after and before the caller's current stream."""
    calc = fences.calc()
    fences.comm_waits(calc)
    with on_stream(fences.comm):
        launch(out, x, *args)
    fences.calc_waits(calc)


def _on_stream(ring: Ring, calls: list[Call[Any]], grouped: bool) -> None:
    _start(ring, calls, grouped)
    for call in calls:
        call.finish()


def _start(ring: Ring, calls: list[Call[Any]], grouped: bool) -> list[Any]:
    if grouped:  # also a group of one: a peer's group, which meets it, may have more
        ring._engine.prepare(calls)
    try:
        if not grouped:
            return [_guarded(ring, call, call.start) for call in calls]
        with ring._engine.grouped(calls):
            return [_guarded(ring, call, call.start) for call in calls]
    except CommError:
        raise
    except Unconnected as error:
        if not grouped:
            raise
        last = calls[-1]  # those before it may be launched
        raise failure_of(ring, last.order, last.collective, error) from error
    except Exception as error:  # an engine may report a failure only at the end of the group
        last = calls[-1]
        raise failure_of(ring, last.order, last.collective, error) from error
    except BaseException:
        ring._health.interrupted(calls[-1].collective)
        raise


def _on_host(ring: Ring, call: Call[Any], handle: Any, seconds: float | None) -> OnHost:
    wait, late = partial(_wait, ring, call, handle, seconds), partial(_late, ring, [call])
    return OnHost(handle, wait, call, late)


def _wait(
    ring: Ring,
    call: Call[Any],
    handle: Any,
    seconds: float | None,
    deadline: Deadline | None = None,
) -> None:
    """Block until a call on a host has ended; may be interrupted anywhere, and called again.

    Args:
        ring: The ring.
        call: What was launched.
        handle: What the launch returned.
        seconds: The call's own deadline, for error texts.
        deadline: Of this wait.
    """
    if handle is not None:
        most = seconds if deadline is None else deadline.seconds
        _guarded(ring, call, partial(ring._engine.wait, handle, deadline), most)
    _guarded(ring, call, call.finish)


def _guarded(
    ring: Ring, call: Call[Any], step: Callable[[], Any], seconds: float | None = None
) -> Any:
    """Run one step of the library below; its failure is the ring's failure, in our words."""
    try:
        return step()
    except (PeerTimeout, StreamError) as error:
        raise ring._health.failed(call.collective, error, call.args) from error
    except (CommError, Unconnected):
        raise
    except Exception as error:
        raise failure_of(ring, call.order, call.collective, error, call.args, seconds) from error


def _late(ring: Ring, calls: list[Call[Any]], seconds: float) -> CommError:
    """Return the error of an operation whose own deadline has passed; it has failed then."""
    last = calls[-1]
    args = last.args if len(calls) == 1 else ()  # nothing says which call of a group is late
    return failure_of(ring, last.order, last.collective, RuntimeError(OVER), args, seconds)


def failure_of(
    ring: Ring,
    order: Any,
    collective: str,
    error: Exception,
    args: tuple[Any, ...] = (),
    seconds: float | None = None,
) -> CommError:
    """Return the error of a failed call: its order of calls has ended, or the ring fails."""
    ended = None if order is None else order.failed(collective, error, args, seconds)
    failure: CommError = ended or ring._health.failed(collective, error, args, seconds)
    return failure
