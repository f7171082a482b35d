"""Calls with their own deadline, in place of the ring's."""

from datetime import timedelta
from functools import partial
from typing import Any

import torch

from commlib.core.calls.call import Call, Result
from commlib.core.dispatch import async_unsupported, dispatch, wait_if_sync
from commlib.core.ring import Ring
from commlib.core.stream_mode import StreamMode
from commlib.core.work import Work, await_event
from commlib.deadlines import Deadline
from commlib.errors import ArgumentError
from commlib.streams import capturing

Seconds = float | timedelta


def dispatch_within(
    ring: Ring, call: Call[Result], mode: StreamMode, timeout: Seconds
) -> Result | Work:
    """Dispatch one validated call that the host waits for at most ``timeout``, on a GPU too.

    On a CPU the engine gets the deadline, which may be longer than the ring's. On a GPU the call
    is launched as without it, and the host waits for the stream of the call.
    """
    limit = call_deadline(ring, call.collective, timeout)
    if ring._open_group is not None:
        raise ArgumentError(
            f"{ring._describe(call.collective)}: timeout= inside a group, which is one operation; "
            f"pass it to ring.group(timeout=...)"
        )
    if not mode.sync_op and mode.use_calc_stream:
        raise ArgumentError(async_unsupported(ring, call.collective))
    if ring._fences is None:
        async_mode = mode._replace(use_calc_stream=False, sync_op=False, seconds=limit.seconds)
        work: Any = dispatch(ring, call, async_mode)
        work._limit = limit
        return wait_if_sync(ring, call.collective, work, mode.sync_op)
    done = dispatch(ring, call, mode)
    if isinstance(done, Work):
        done._limit = limit
    else:
        await_stream(ring, call.collective, mode, limit, call.args)
    return done


def call_deadline(ring: Ring, collective: str, timeout: Seconds) -> Deadline:
    """Return the deadline of a call that begins now.

    Raises:
        ArgumentError: ``timeout`` is not a number of seconds, or a graph is being captured.
    """
    try:
        limit = Deadline(timeout)
    except ArgumentError as error:
        raise ArgumentError(f"{ring._describe(collective)}: {error}") from None
    if ring._fences is not None and capturing():
        raise ArgumentError(
            f"{ring._describe(collective)}: timeout= during a CUDA graph capture: the host can't "
            f"wait for what a capture records; leave it away"
        )
    return limit


def await_stream(
    ring: Ring, collective: str, mode: StreamMode, limit: Deadline, args: tuple[Any, ...] = ()
) -> None:
    """Block the host until the stream of a launched call has done what it has now.

    ``args``: Those of the launch, for error texts.
    """
    if ring._fences is None:
        return
    stream = torch.cuda.current_stream(ring.device) if mode.use_calc_stream else ring._fences.comm
    event = torch.cuda.Event()
    event.record(stream)
    await_event(event, limit, partial(ring._health.late, collective, args))
