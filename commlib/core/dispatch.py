"""Dispatch: every collective is recorded, launched on its stream and tracked here."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from commlib import flags
from commlib.core.call import Call, apart, as_they_are, written
from commlib.core.mismatch import compare
from commlib.core.modes import check_untraced, depth, is_tracing
from commlib.core.observers import Seen, begun, looking_on, observers, watched
from commlib.core.ring import Ring
from commlib.core.stream_mode import StreamMode
from commlib.core.work import OnHost, OnStream, Work
from commlib.deferred import release_deferred
from commlib.engines.base import Unconnected
from commlib.errors import ArgumentError, CommError, PeerTimeout, StreamError
from commlib.streams import capture_of, stream_captures
from commlib.waits import wait_for


def nothing(out: torch.Tensor | None, x: torch.Tensor | None, *args: Any) -> None:
    """Launch nothing: empty tensors have nothing to move, on any rank."""


def dispatch(ring: Ring, call: Call, mode: StreamMode) -> Any:
    """Pass one validated call: record it, launch it on its stream, track it until it ends."""
    collective, out, x = call.collective, call.out, call.x
    if not call.dense or depth() or is_tracing():
        check_untraced(ring, collective, out, x)
    if not call.dense and x is not None and x.requires_grad:
        call.x = x = x.detach()  # gradients take the registered ops instead
    if observers and ring._open_group is None and looking_on():
        again = partial(dispatch, ring, call, mode)
        with watched([Seen(ring, collective, out, x, call.args, partial(finished, again))]):
            return again()
    if not (
        mode.sync_op
        and not ring._compares
        and (mode.use_calc_stream or ring._fences is None)
        and (not ring._groups or ring._open_group is None)
        and not mode.blocks
        and (apart(out, x, call.place) if call.dense else as_they_are(out, x, call.place))
    ):
        return _tracked(ring, call, mode)
    # The common case: nothing to stage, no fence, nothing to track after the call.
    missing: Unconnected | None = None
    with ring._lock:
        if ring._health.fault is not None:
            raise ring._health.unusable(collective)
        try:
            handle = call.launch(out, x, *call.args)
        except Unconnected as caught:
            missing = caught
        except Exception as error:
            raise ring._health.failed(collective, error, call.args) from error
        except BaseException:
            ring._health.interrupted(collective)
            raise
        else:
            ring._calls += 1
            ring._last = collective
            if ring._call_log is not None:
                ring._call_log.note(collective, call.launch, call.args, out, x)
    if missing is not None:
        _connect(ring, collective, missing)
        return dispatch(ring, call, mode)
    if handle is not None:  # a CPU: the host waits, outside the lock, so that other calls go on
        try:
            wait_for(handle)
        except Exception as error:
            raise ring._health.failed(collective, error, call.args) from error
        except BaseException:
            ring._health.interrupted(collective)
            raise
    if out is not None:
        written(out)
    return call.result


def _connect(ring: Ring, collective: str, missing: Unconnected) -> None:
    """Make a connection that a call lacks; the call is made again then."""
    try:
        missing.connect()
    except Exception as error:
        raise ring._health.failed(collective, error) from error


def connected(ring: Ring, collective: str, launch_all: Callable[[], Any]) -> Any:
    """Run a step that launches; if the ring lacks a connection, make it and run the step again."""
    while True:
        try:
            return launch_all()
        except Unconnected as missing:
            _connect(ring, collective, missing)


def finished(call: Callable[[], Any]) -> Any:
    """Make a call, and wait for it if it has been handed out as a Work."""
    done = call()
    return done.wait() if isinstance(done, Work) else done


def begin(ring: Ring, call: Call, blocks: int) -> Work | None:
    """Launch the first half of a validated call; None, and nothing done, if it has no halves."""
    collective, out, x = call.collective, call.out, call.x
    check_untraced(ring, collective)
    observed = observers and looking_on()
    if ring._compares or not apart(out, x, 0) or (observed and ring._fences is None):
        return None
    if observed:
        again = partial(begin, ring, call, blocks)
        with watched([Seen(ring, collective, out, x, call.args, partial(finished, again))]):
            return again()
    assert out is not None and x is not None
    with ring._lock:
        if ring._health.fault is not None:
            raise ring._health.unusable(collective)
        try:
            with ring._engine.bounded(blocks):
                pending = call.launch(out, x.detach(), *call.args)
        except Exception as error:
            raise ring._health.failed(collective, error) from error
        except BaseException:
            ring._health.interrupted(collective)
            raise
        if pending is None:
            return None
        ring._calls += 1
        ring._last = collective
        if ring._call_log is not None:
            ring._call_log.note(collective, call.launch, call.args, out, x)
    written(out)
    return begun(Work(out, pending))


def _tracked(ring: Ring, call: Call, mode: StreamMode) -> Any:
    opened = ring._open_group
    if not mode.sync_op and (mode.use_calc_stream or opened is not None):
        raise ArgumentError(async_unsupported(ring, call.collective))
    if ring._compares and opened is None:
        [call] = compare(ring, [call])  # without the lock: it waits for the other members
    if opened is not None:
        if ring._health.fault is not None:
            raise ring._health.unusable(call.collective)
        return opened.add(call, mode.use_calc_stream)

    def launch_one() -> Any:
        with ring._lock:
            if ring._health.fault is not None:
                raise ring._health.unusable(call.collective)
            return launch(ring, [call], call.result, mode)

    return settle(ring, call.collective, connected(ring, call.collective, launch_one), mode.sync_op)


def settle(ring: Ring, collective: str, done: Any, sync_op: bool) -> Any:
    """Block where the host is what has to wait; outside the lock, so that other calls go on."""
    if not sync_op or ring._fences is not None:
        return done
    try:
        return done.wait()
    except Exception:
        raise
    except BaseException:  # the caller has no Work to wait for later
        ring._health.interrupted(collective)
        raise


def async_unsupported(ring: Ring, collective: str) -> str:
    """Return why a call can't be asynchronous here."""
    if ring._open_group is not None:
        return (
            f"{ring._describe(collective)}: sync_op=False inside a group: the group is one "
            f"operation; "
            f"open it by `with ring.group(use_calc_stream=False, sync_op=False) as work:`"
        )
    return (
        f"{ring._describe(collective)}: sync_op=False with use_calc_stream=True: a call on the "
        f"caller's own "
        f"stream is already ordered, so there is nothing to wait for; pass use_calc_stream=False"
    )


def launch(ring: Ring, calls: list[Call], result: Any, mode: StreamMode) -> Any:
    """Launch ``calls`` as one operation; return ``result``, or a Work where one is unfinished."""
    use_calc_stream, sync_op, fenced, blocks = mode
    fences = ring._fences
    if fences is None:
        return begun(Work(result, _on_host(ring, calls)))
    if use_calc_stream:
        with ring._engine.bounded(blocks):
            _on_stream(ring, calls)
        return result
    calc = torch.cuda.current_stream(ring.device)
    capturing = stream_captures()
    if not capturing:
        release_deferred()
    # Without a fence the comm stream would run outside a capture, once, and never at a replay.
    fenced = fenced or capturing
    if fenced:
        fences.comm_waits(calc)
    if not (sync_op and fenced):  # the program's own kernels run at the same time
        blocks = blocks or flags.get(flags.ASYNC_BLOCKS)
    with torch.cuda.stream(fences.comm), ring._engine.bounded(blocks):
        _on_stream(ring, calls)
    if fenced and sync_op:
        fences.calc_waits(calc)
        return result
    event = torch.cuda.Event()
    event.record(fences.comm)
    capture = capture_of(calc.cuda_stream) if capturing else 0
    work = begun(Work(result, OnStream(event, calc, calls, capture)))
    if sync_op:
        ring._unfenced.keep(event, calls)
        return result
    return work


def _start(ring: Ring, calls: list[Call]) -> list[Any]:
    handles = _start_all(ring, calls)
    ring._calls += len(calls)
    ring._last = calls[-1].collective
    if ring._call_log is not None:
        for call in calls:
            ring._call_log.note(call.collective, call.launch, call.args, call.out, call.x)
    return handles


def _start_all(ring: Ring, calls: list[Call]) -> list[Any]:
    if len(calls) > 1:
        ring._engine.prepare(calls)
    try:
        if len(calls) == 1:
            return [_guarded(ring, calls[0], calls[0].start)]
        with ring._engine.coalesced():
            return [_guarded(ring, call, call.start) for call in calls]
    except CommError:
        raise
    except Unconnected as error:
        if len(calls) == 1:
            raise
        raise ring._health.failed(
            calls[-1].collective, error
        ) from error  # calls of the group may be launched
    except Exception as error:  # an engine may report a failure only at the end of the group
        raise ring._health.failed(calls[-1].collective, error) from error
    except BaseException:
        ring._health.interrupted(calls[-1].collective)
        raise


def _on_stream(ring: Ring, calls: list[Call]) -> None:
    _start(ring, calls)
    for call in calls:
        call.finish()


def _on_host(ring: Ring, calls: list[Call]) -> OnHost:
    handles = _start(ring, calls)

    def await_all() -> None:  # may be interrupted anywhere, and is called again then
        for call, handle in zip(calls, handles, strict=True):
            if handle is not None:
                _guarded(ring, call, partial(wait_for, handle))
            _guarded(ring, call, call.finish)

    return OnHost(handles, await_all, calls)


def _guarded(ring: Ring, call: Call, step: Callable[[], Any]) -> Any:
    """Run one step of the library below; its failure is the ring's failure, in our words."""
    try:
        return step()
    except (PeerTimeout, StreamError) as error:
        raise ring._health.failed(call.collective, error, call.args) from error
    except (CommError, Unconnected):
        raise
    except Exception as error:
        raise ring._health.failed(call.collective, error, call.args) from error
