"""Dispatch: every collective is launched on its stream, counted and tracked here."""

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, NoReturn, TypeVar

import torch
from torch.autograd import forward_ad

from commlib.core.calls.call import Call, Launch, Result, as_they_are, increment_version, written
from commlib.core.calls.log import EVERY, Entry
from commlib.core.compiler import switch
from commlib.core.launches import failure_of, launch, on_comm_stream
from commlib.core.mismatch import compare
from commlib.core.modes import check_untraced, depth, is_tracing
from commlib.core.observers import Seen, begun, looking_on, observers, watched
from commlib.core.posting import differs, post_all
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES, StreamMode
from commlib.core.tensors import NO_DISPATCH
from commlib.core.work import Work
from commlib.deferred import kept, release_deferred
from commlib.engines.base import Unconnected
from commlib.errors import ArgumentError
from commlib.streams import current_raw, stream_captures

Tensor = torch.Tensor
Outcome = TypeVar("Outcome")
ON_STREAM, ON_COMM_STREAM = MODES[True, True, True], MODES[False, True, True]


def is_plain(ring: Ring, x: Tensor, out: Tensor, *, part: bool = False) -> bool:
    """Return True if no check of the tensors can fail, and an engine can take them as they are.

    The common case, in as few look-ups as possible: no mode and no trace is active; the tensors are
    dense, on the ring's device, of one dtype, and require no gradient; they share no bytes, unless
    they are one tensor. A call with one tensor gives it twice.

    ``part``: where the engine has such a form, one tensor may also be this rank's part of the other
    one; the caller checks their sizes.
    """
    if depth() or is_tracing() or forward_ad._current_level >= 0:
        return False
    number = ring._device_number
    try:
        for tensor in (x,) if out is x else (x, out):
            if not (  # has_memory and is_dense, written out: calls of them would cost more
                (type(tensor) is Tensor or type(tensor).__torch_dispatch__ is NO_DISPATCH)
                and tensor.data_ptr() != 0
                and tensor.get_device() == number
                and not tensor.requires_grad
                and not tensor.is_nested
                and not tensor.is_quantized
                and tensor.is_contiguous()
                and not tensor.is_neg()
                and not tensor.is_conj()
            ):
                return False
        if out is x:
            return True
        if out.is_inference() and not torch.is_inference_mode_enabled():
            return False
        a, b = out.data_ptr(), x.data_ptr()
        if a >= b + x.nbytes or b >= a + out.nbytes:
            return out.dtype is x.dtype
        if not part or not ring._engine.parts_in_place or out.dtype is not x.dtype:
            return False
        return b - a == ring.rank * x.nbytes or a - b == ring.rank * out.nbytes
    except (AttributeError, RuntimeError):  # not a tensor; a tensor without a storage
        return False


def dispatch(ring: Ring, call: Call[Result], mode: StreamMode) -> Result | Work:
    """Pass one validated call to the engine: at once, or tracked until it ends."""
    before = switch(None)  # where torch.compile skipped the program's function, it would trace ours
    try:
        if (observers or ring._orders or not call.plain) and _prepare(ring, call):
            return _observed(ring, call, partial(dispatch, ring, call, mode))
        out, x, offset, order = call.out, call.x, call.place, call.order
        dense = call.plain and (out is not x or offset == 0)
        if (dense or as_they_are(out, x, offset)) and launched(
            ring,
            mode,
            call.collective,
            call.launch,
            call.args,
            out,
            x,
            call.entry,
            order,
            asked=True,
        ):
            return call.result
        return _tracked(ring, call, mode)
    finally:
        switch(before)


def launched(
    ring: Ring,
    mode: StreamMode,
    collective: str,
    launch: Launch,
    args: tuple[Any, ...],
    out: Tensor | None,
    x: Tensor | None,
    entry: Entry | None,
    order: Any = None,
    *,
    asked: bool = False,
) -> bool:
    """Launch a call of dense tensors that nothing delays, in few steps; on a CPU wait for it.

    ``asked``: ``dispatch`` makes the call, and has asked observers and orders.

    Returns:
        False, and nothing is done: ``dispatch`` is to make the call.
    """
    if ring._compares or (not asked and (observers or ring._orders)):
        return False
    if ring._groups and ring._open_group is not None:
        return False
    fences = None
    if mode is not ON_STREAM:
        fences = ring._fences
        if mode is not ON_COMM_STREAM or (asked and fences is not None):
            return False
    before, handle = switch(None), None  # as in ``dispatch``
    try:
        if kept:
            release_deferred()
        with ring._lock:
            if ring._health.fault is not None:
                raise ring._health.unusable(collective)
            try:
                board = ring._board if order is None else order.board
                if board and entry and (other := board.post(entry)) is not None:
                    raise differs(ring, collective, entry, order, other)  # as ``post_all``
                if fences is None:
                    handle = launch(out, x, *args)
                else:
                    on_comm_stream(fences, launch, out, x, args)
            except Unconnected:
                return False
            except BaseException as error:
                _fail(ring, collective, args, error, order)
            count(ring, collective, entry, order)
        if handle is not None:  # a CPU: the host waits, outside the lock, so that other calls go on
            try:
                ring._engine.wait(handle)
            except BaseException as error:
                _fail(ring, collective, args, error, order)
        if out is not None and not out.is_inference():
            increment_version((out,))
        return True
    finally:
        switch(before)


def _prepare(ring: Ring, call: Call[Any]) -> bool:
    """Give a call to its order and check it; return True if observers are to see it."""
    if ring._orders and (order := ring._orders.get(get_ident())) is not None:
        order.take(call)
    if not call.plain:
        check_untraced(ring, call.collective, call.out, call.x)
        if call.x is not None and call.x.requires_grad:
            call.x = call.x.detach()  # gradients take the registered ops instead
    return bool(observers and ring._open_group is None and looking_on())


def _fail(ring: Ring, name: str, args: Any, error: BaseException, order: Any) -> NoReturn:
    """Raise the error of a launch or a wait that failed; the ring or the order has failed then."""
    try:
        if isinstance(error, ArgumentError):  # nothing was launched, or it is that of ``differs``
            raise error
        if isinstance(error, Exception):
            raise failure_of(ring, order, name, error, args) from error
        ring._health.interrupted(name)
        raise error
    finally:
        del error  # its traceback has this frame: the two would keep the tensors of the call


def _observed(ring: Ring, call: Call[Any], again: Callable[[], Outcome]) -> Outcome:
    """Notify the observers of a call, and make it without them."""
    with watched([Seen(ring, call.collective, call.out, call.x, call.args, again)]):
        return again()


def count(ring: Ring, collective: str, entry: Entry | None, order: Any) -> None:
    """Count a launched call, and add it to the ring's call log; the ring's lock is held."""
    ring._calls += 1
    ring._last = collective
    log = ring._call_log
    if order is not None and order.log is not None:
        log = order.log
    if log is None:
        return
    # The default stream, 0, is never captured; its handle is a shorter question.
    if ring._fences is not None and current_raw(ring._device_number) and stream_captures():
        log.captured = True  # the replays of a graph are not seen here
    elif entry is not None:
        log.window.append(entry)
        if len(log.window) == EVERY:
            log.fold()


def _tracked(ring: Ring, call: Call[Result], mode: StreamMode) -> Result | Work:
    """Make a call of a group, or one that is compared, staged, fenced or unfinished."""
    opened = ring._open_group
    if not mode.sync_op and (mode.use_calc_stream or opened is not None):
        raise ArgumentError(async_unsupported(ring, call.collective))
    if opened is not None:
        if ring._health.fault is not None:
            raise ring._health.unusable(call.collective)
        opened.add(call, mode.use_calc_stream)
        return call.result
    if ring._compares:
        [call] = compare(ring, [call])  # without the lock: it waits for the other members
    done = issue(ring, call.collective, [call], call.result, mode)
    return wait_if_sync(ring, call.collective, done, mode.sync_op)


def issue(
    ring: Ring, name: str, calls: list[Call[Any]], result: Result, mode: StreamMode
) -> Result | Work:
    """Launch ``calls`` as one operation, after the connection that they may lack is made."""
    while True:
        with ring._lock:
            if ring._health.fault is not None:
                raise ring._health.unusable(name)
            if ring._board is not None:
                post_all(ring, name, calls)
            try:
                done = launch(ring, calls, result, mode, grouped=name == "group")
            except Unconnected as caught:
                missing = caught
            else:
                for call in calls:
                    count(ring, call.collective, call.entry, call.order)
                return done
        try:
            missing.connect()
        except Exception as error:
            raise ring._health.failed(name, error) from error


def wait_if_sync(ring: Ring, collective: str, done: Result | Work, sync_op: bool) -> Result | Work:
    """Block where the host is what has to wait; outside the lock, so that other calls go on."""
    if not sync_op or ring._fences is not None or not isinstance(done, Work):
        return done
    try:
        result: Result = done.wait()
    except Exception:
        raise
    except BaseException:  # the caller has no Work to wait for later
        ring._health.interrupted(collective)
        raise
    return result


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


def begin(ring: Ring, call: Call[Any], blocks: int) -> Work | None:
    """Launch the first half of a validated call; None, and nothing done, if it has no halves."""
    collective, out, x = call.collective, call.out, call.x
    check_untraced(ring, collective)
    observed = observers and looking_on()
    assert out is not None and x is not None
    if ring._compares or not as_they_are(out, x, 0) or (observed and ring._fences is None):
        return None
    if not ring._engine.splits(x, *call.args):
        return None
    if observed:
        return _observed(ring, call, partial(begin, ring, call, blocks))
    with ring._lock:
        if ring._health.fault is not None:
            raise ring._health.unusable(collective)
        try:
            with ring._engine.bounded(blocks):
                pending = call.launch(out, x.detach(), *call.args)
        except BaseException as error:
            _fail(ring, call.collective, call.args, error, call.order)
        count(ring, call.collective, call.entry, call.order)
    written(out)
    return begun(Work(out, pending))
