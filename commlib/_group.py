"""Calls that are collected, and launched together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from commlib._gate import Call, async_refusal, finished, launch, settle
from commlib._modes import watched as under_mode
from commlib._observers import Seen, looking_on, observers, unwatched, watched
from commlib._ring import Ring
from commlib._work import Unlaunched, Work
from commlib.errors import ArgumentError


class Group:
    """Calls collected inside ``with comm.group()``, launched together when it is left."""

    def __init__(self, ctx: Ring, use_calc_stream: bool, sync_op: bool) -> None:
        self.ctx, self.use_calc_stream, self.sync_op = ctx, use_calc_stream, sync_op
        self.calls: list[Call] = []
        inside = "wait() inside its own group: leave the `with comm.group()` block first"
        self.work = Work([], Unlaunched(inside))

    def add(self, call: Call, use_calc_stream: bool, result: Any) -> Any:
        """Keep ``call`` for later; its result is valid after the group."""
        if self.use_calc_stream and not use_calc_stream:
            raise ArgumentError(
                f"{self.ctx.where(call.verb)}: use_calc_stream=False inside a group on the calc "
                f"stream; type `with comm.group(use_calc_stream=False):`"
            )
        self.calls.append(call)
        self.work._result.append(result)
        return result

    def _seen(self, again: Callable[[], Any]) -> Iterator[Seen]:
        """Yield the calls as observers are told of them; the first makes all of them again."""
        for call in self.calls:
            redo = partial(finished, again) if call is self.calls[0] else _nothing
            yield Seen(self.ctx, call.verb, call.out, call.x, call.args, redo)

    def leave(self) -> None:
        """Launch everything as one operation."""
        if self.calls:
            how = self.use_calc_stream, self.sync_op, True, 0
            start = partial(launch, self.ctx, self.calls, None, how)
            if observers and looking_on():
                with watched(self._seen(start)):
                    done = start()
            elif under_mode():  # whose operators have been seen one by one
                with unwatched():
                    done = start()
            else:
                done = start()
            self.work._pending = done._pending if isinstance(done, Work) else None
        else:
            self.work._pending = None


@contextmanager
def group(ctx: Ring, use_calc_stream: bool, sync_op: bool) -> Iterator[Work]:
    """Collect the calls of a ``with`` block; an exception inside launches none of them."""
    if use_calc_stream and not sync_op:
        raise ArgumentError(async_refusal(ctx, "group"))
    with ctx.lock:
        if ctx.open_group is not None:
            raise ArgumentError(f"{ctx.where('group')}: a group is open already; leave it first")
        opened = ctx.open_group = Group(ctx, use_calc_stream, sync_op)
        try:
            yield opened.work
        except BaseException:
            none = f"{ctx.where('group')}: an exception left the group; none of it was launched"
            opened.work._pending = Unlaunched(none)
            raise
        finally:
            ctx.open_group = None
        opened.leave()
    settle(ctx, opened.work, sync_op)


def _nothing() -> None:
    """Do nothing."""
