"""The one gate that every collective passes: check, record, launch, track."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import graph

from commlib import flags
from commlib.core.mismatch import compare
from commlib.core.modes import check_untraced, depth, is_tracing
from commlib.core.observers import Seen, begun, looking_on, observers, unwatched, watched
from commlib.core.ring import Ring, Unconnected
from commlib.core.tensors import dense_copy, is_dense
from commlib.core.work import OnHost, OnStream, Pending, Work, release_deferred
from commlib.errors import ArgumentError, CommError, PeerTimeout, StreamError
from commlib.streams import capture_of, stream_captures
from commlib.waits import wait_for

Launch = Callable[..., Any]
How = tuple[bool, bool, bool, int]  # use_calc_stream, sync_op, fenced, most blocks (0: any number)

# torch's public function wraps this one; it is asked at every call, hence the shorter way.
_increment_version = getattr(torch._C, "_increment_version", graph.increment_version)


class Call:
    """One collective: what the user gave, and what the engine is given."""

    __slots__ = ("args", "dst", "launch", "out", "place", "src", "verb", "x")

    def __init__(
        self,
        verb: str,
        launch: Launch,
        args: tuple[Any, ...],
        out: torch.Tensor | None,
        x: torch.Tensor | None,
        place: int | None,
    ) -> None:
        self.verb, self.launch, self.args, self.out, self.x = verb, launch, args, out, x
        self.place = place

    def start(self) -> Any:
        """Stage what the engine can't take as it is, and launch on the current stream."""
        out, src = self.out, self.x
        dst = out
        if out is not None and not is_dense(out):
            dst = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        if src is not None:
            if not is_dense(src):
                src = dense_copy(src)
            elif dst is not None and _collide(dst, src, self.place):
                src = src.clone()
        self.dst, self.src = dst, src
        return self.launch(dst, src, *self.args)

    def finish(self) -> None:
        """Put a staged result where the user wants it, and let autograd know of the write."""
        if self.out is None or self.dst is None:
            return
        if self.dst is self.out:
            _written(self.out)
            return
        # Whoever waits may do so in another grad or inference mode than the caller's.
        inference = torch.inference_mode(self.out.is_inference())
        with unwatched(), inference, torch.no_grad():
            self.out.copy_(self.dst)


def _written(out: torch.Tensor) -> None:
    """Let autograd know that saved values may be gone; inference tensors are never saved."""
    if not out.is_inference():
        _increment_version((out,))


def _as_they_are(out: torch.Tensor | None, x: torch.Tensor | None, place: int | None) -> bool:
    """Whether an engine can take both tensors without staging."""
    return (out is None or is_dense(out)) and (x is None or is_dense(x)) and _apart(out, x, place)


def _apart(out: torch.Tensor | None, x: torch.Tensor | None, place: int | None) -> bool:
    """Whether dense tensors share no bytes, or in the way that the engine allows."""
    if out is x:
        return out is None or place == 0
    return out is None or x is None or not _collide(out, x, place)


def _collide(out: torch.Tensor, x: torch.Tensor, place: int | None) -> bool:
    """Whether dense ``out`` and ``x`` share bytes in a way that the engine does not allow.

    ``place`` is the in-place form: how many elements behind the start of ``out`` ``x`` may begin
    (negative: before it); None if the operation has no such form.
    """
    a, b = out.data_ptr(), x.data_ptr()
    if a >= b + x.nbytes or b >= a + out.nbytes:
        return False
    return place is None or b - a != place * out.itemsize


def run(
    ctx: Ring,
    verb: str,
    launcher: Launch,
    args: tuple[Any, ...],
    out: torch.Tensor | None,
    x: torch.Tensor | None,
    place: int | None,
    dense: bool,
    result: Any,
    how: How,
) -> Any:
    """Pass one checked call: record it, launch it on its stream, track what is unfinished."""
    use_calc_stream, sync_op, _, blocks = how
    if not dense or depth() or is_tracing():
        check_untraced(ctx, verb, out, x)
    if not dense and x is not None and x.requires_grad:
        x = x.detach()  # gradients go through the registered operators, never through here
    if observers and ctx.open_group is None and looking_on():
        again = partial(run, ctx, verb, launcher, args, out, x, place, dense, result, how)
        with watched([Seen(ctx, verb, out, x, args, partial(finished, again))]):
            return again()
    if not (
        sync_op
        and not ctx.compares
        and (use_calc_stream or ctx.fences is None)
        and (not ctx.groups or ctx.open_group is None)
        and not blocks
        and (
            ((out is x and place == 0) or _apart(out, x, place))
            if dense
            else _as_they_are(out, x, place)
        )
    ):
        call = Call(verb, launcher, args, out, x, place)
        return _tracked(ctx, call, result, how)
    # The common case: nothing to stage, no fence, nothing to track after the call.
    missing: Unconnected | None = None
    with ctx.lock:
        if ctx.fault is not None:
            raise ctx.unusable(verb)
        try:
            handle = launcher(out, x, *args)
        except Unconnected as caught:
            missing = caught
        except Exception as error:
            raise ctx.failed(verb, error, args) from error
        except BaseException:
            ctx.interrupted(verb)
            raise
        else:
            ctx.calls += 1
            ctx.last_verb = verb
            if ctx.call_log is not None:
                ctx.call_log.note(verb, launcher, args, out, x)
    if missing is not None:
        _connect(ctx, verb, missing)
        return run(ctx, verb, launcher, args, out, x, place, dense, result, how)
    if handle is not None:  # a CPU: the host waits, outside the lock, so that other calls go on
        try:
            wait_for(handle)
        except Exception as error:
            raise ctx.failed(verb, error, args) from error
        except BaseException:
            ctx.interrupted(verb)
            raise
    if out is not None:
        _written(out)
    return result


def _connect(ctx: Ring, verb: str, missing: Unconnected) -> None:
    """Make a connection that a call lacks; the call is made again then."""
    try:
        missing.connect()
    except Exception as error:
        raise ctx.failed(verb, error) from error


def connected(ctx: Ring, verb: str, launch_all: Callable[[], Any]) -> Any:
    """Run a step that launches; where the ring lacks a connection, make it and run it again."""
    while True:
        try:
            return launch_all()
        except Unconnected as missing:
            _connect(ctx, verb, missing)


def finished(call: Callable[[], Any]) -> Any:
    """Make a call, and wait for it if it has been handed out as a Work."""
    done = call()
    return done.wait() if isinstance(done, Work) else done


def begin(
    ctx: Ring,
    verb: str,
    launcher: Callable[..., Pending | None],
    out: torch.Tensor,
    x: torch.Tensor,
    reduction: Any,
    blocks: int,
) -> Work | None:
    """Launch the first half of a checked call; None, and nothing done, where it has no halves."""
    check_untraced(ctx, verb)
    here = observers and looking_on()
    if ctx.compares or not _apart(out, x, 0) or (here and ctx.fences is None):
        return None
    if here:
        again = partial(begin, ctx, verb, launcher, out, x, reduction, blocks)
        with watched([Seen(ctx, verb, out, x, (reduction,), partial(finished, again))]):
            return again()
    with ctx.lock:
        if ctx.fault is not None:
            raise ctx.unusable(verb)
        try:
            with ctx.bounded(blocks):
                pending = launcher(out, x.detach(), reduction)
        except Exception as error:
            raise ctx.failed(verb, error) from error
        except BaseException:
            ctx.interrupted(verb)
            raise
        if pending is None:
            return None
        ctx.calls += 1
        ctx.last_verb = verb
        if ctx.call_log is not None:
            ctx.call_log.note(verb, launcher, (reduction,), out, x)
    _written(out)
    return begun(Work(out, pending))


def _tracked(ctx: Ring, call: Call, result: Any, how: How) -> Any:
    use_calc_stream, sync_op, _, _ = how
    group = ctx.open_group
    if not sync_op and (use_calc_stream or group is not None):
        raise ArgumentError(async_refusal(ctx, call.verb))
    if ctx.compares and group is None:
        [call] = compare(ctx, [call])  # without the lock: it waits for the other members
    if group is not None:
        if ctx.fault is not None:
            raise ctx.unusable(call.verb)
        return group.add(call, use_calc_stream, result)

    def launch_one() -> Any:
        with ctx.lock:
            if ctx.fault is not None:
                raise ctx.unusable(call.verb)
            return launch(ctx, [call], result, how)

    return settle(ctx, call.verb, connected(ctx, call.verb, launch_one), sync_op)


def settle(ctx: Ring, verb: str, done: Any, sync_op: bool) -> Any:
    """Block where the host is what has to wait; outside the lock, so that other calls go on."""
    if not sync_op or ctx.fences is not None:
        return done
    try:
        return done.wait()
    except Exception:
        raise
    except BaseException:  # the caller has no Work to wait for later
        ctx.interrupted(verb)
        raise


def async_refusal(ctx: Ring, verb: str) -> str:
    """Say why a call may not be asynchronous here; empty if it may."""
    if ctx.open_group is not None:
        return (
            f"{ctx.where(verb)}: sync_op=False inside a group: the group is one operation; "
            f"open it by `with ring.group(use_calc_stream=False, sync_op=False) as work:`"
        )
    return (
        f"{ctx.where(verb)}: sync_op=False with use_calc_stream=True: a call on the caller's own "
        f"stream is already ordered, so there is nothing to wait for; type use_calc_stream=False"
    )


def launch(ctx: Ring, calls: list[Call], result: Any, how: How) -> Any:
    """Launch ``calls`` as one operation; return ``result``, or a Work where one is unfinished."""
    use_calc_stream, sync_op, fenced, blocks = how
    fences = ctx.fences
    if fences is None:
        return begun(Work(result, _on_host(ctx, calls)))
    if use_calc_stream:
        with ctx.bounded(blocks):
            _on_stream(ctx, calls)
        return result
    calc = torch.cuda.current_stream(ctx.device)
    capturing = stream_captures()
    if not capturing:
        release_deferred()
    # Without a fence the comm stream would run outside a capture, once, and never at a replay.
    fenced = fenced or capturing
    if fenced:
        fences.comm_waits(calc)
    if not (sync_op and fenced):  # the program's own kernels run at the same time
        blocks = blocks or flags.get(flags.ASYNC_BLOCKS)
    with torch.cuda.stream(fences.comm), ctx.bounded(blocks):
        _on_stream(ctx, calls)
    if fenced and sync_op:
        fences.calc_waits(calc)
        return result
    event = torch.cuda.Event()
    event.record(fences.comm)
    capture = capture_of(calc.cuda_stream) if capturing else 0
    work = begun(Work(result, OnStream(event, calc, calls, capture)))
    if sync_op:
        ctx.keep_unfenced(event, calls)
        return result
    return work


def _start(ctx: Ring, calls: list[Call]) -> list[Any]:
    handles = _start_all(ctx, calls)
    ctx.calls += len(calls)
    ctx.last_verb = calls[-1].verb
    if ctx.call_log is not None:
        for call in calls:
            ctx.call_log.note(call.verb, call.launch, call.args, call.out, call.x)
    return handles


def _start_all(ctx: Ring, calls: list[Call]) -> list[Any]:
    if len(calls) > 1:
        ctx.prepare(calls)
    try:
        if len(calls) == 1:
            return [_guarded(ctx, calls[0], calls[0].start)]
        with ctx.coalesced():
            return [_guarded(ctx, call, call.start) for call in calls]
    except CommError:
        raise
    except Unconnected as error:
        if len(calls) == 1:
            raise
        raise ctx.failed(calls[-1].verb, error) from error  # calls of the group may be launched
    except Exception as error:  # an engine may report a failure only at the end of the group
        raise ctx.failed(calls[-1].verb, error) from error
    except BaseException:
        ctx.interrupted(calls[-1].verb)
        raise


def _on_stream(ctx: Ring, calls: list[Call]) -> None:
    _start(ctx, calls)
    for call in calls:
        call.finish()


def _on_host(ctx: Ring, calls: list[Call]) -> OnHost:
    handles = _start(ctx, calls)

    def await_all() -> None:  # may be interrupted anywhere, and is called again then
        for call, handle in zip(calls, handles, strict=True):
            if handle is not None:
                _guarded(ctx, call, partial(wait_for, handle))
            _guarded(ctx, call, call.finish)

    return OnHost(handles, await_all, calls)


def _guarded(ctx: Ring, call: Call, step: Callable[[], Any]) -> Any:
    """Run one step of the library below; its failure is the ring's failure, in our words."""
    try:
        return step()
    except (PeerTimeout, StreamError) as error:
        raise ctx.failed(call.verb, error, call.args) from error
    except (CommError, Unconnected):
        raise
    except Exception as error:
        raise ctx.failed(call.verb, error, call.args) from error
