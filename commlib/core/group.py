"""Calls that are collected, and launched together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from commlib.core.calls.call import Call
from commlib.core.dispatch import async_unsupported, issue, wait_if_sync
from commlib.core.memory import Uses
from commlib.core.mismatch import compare
from commlib.core.modes import watched as under_mode
from commlib.core.observers import Seen, looking_on, observers, unwatched, watched
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES
from commlib.core.within import Seconds, await_stream, call_deadline
from commlib.core.work import Unlaunched, Work
from commlib.deadlines import Deadline
from commlib.errors import ArgumentError

UNTRACED = (
    "ring.group() can't be traced. Call the functions of commlib.ops without a group: compiled "
    "code keeps their order. Where a send and a receive would wait for each other, call "
    "ops.all_to_all with splits, or receive first on one side"
)


def _no_task() -> int:
    return -1


# The number of the backward that this thread works on, -1 outside of all backwards.
_backward_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", _no_task)


class Group:
    """Calls collected inside ``with ring.group()``, launched together at the end of the block.

    It takes the calls of the thread that has opened it, and no others: no lock is held while the
    user's block runs, and calls of other threads are launched at once. The calls that autograd
    makes for a backward inside the block are launched at once too, for their results are used at
    once. On a GPU another thread makes them, on a CPU the same one: the rule is one for both.
    """

    def __init__(
        self, ring: Ring, use_calc_stream: bool, sync_op: bool, seconds: float | None
    ) -> None:
        self.ring, self.use_calc_stream = ring, use_calc_stream
        self.mode = MODES[use_calc_stream, sync_op, True]._replace(seconds=seconds)
        self.calls: list[Call[Any]] = []
        self._uses = Uses()
        self._expects_op = False
        self._task = _backward_task()
        inside = "wait() inside its own group; leave the `with ring.group():` block first"
        self.work: Work = Work([], Unlaunched(ArgumentError(inside)))

    def expect_op(self) -> None:
        """Note that an eager call of the block takes its registered op, which a mode watches."""
        self._expects_op = True

    def takes_op(self) -> bool:
        """Return True if the registered op that is called now belongs to such an eager call."""
        expected, self._expects_op = self._expects_op, False
        return expected

    def collects(self) -> bool:
        """Return True if the calling code is in the block itself, not in a backward inside it."""
        return self._task == _backward_task()

    def add(self, call: Call[Any], use_calc_stream: bool) -> None:
        """Keep ``call`` for later; its result is valid after the group."""
        if self.use_calc_stream and not use_calc_stream:
            raise ArgumentError(
                f"{self.ring._describe(call.collective)}: use_calc_stream=False inside a group on "
                f"the calc stream; open it by `with ring.group(use_calc_stream=False):`"
            )
        self._check_memory(call)
        self.calls.append(call)
        self.work._result.append(call.result)

    def _check_memory(self, call: Call[Any]) -> None:
        """Refuse a call that writes what an earlier one uses, or reads what one writes."""
        tensors = [("out", call.out)]
        if call.x is not call.out:
            tensors.append(("x", call.x))
        for role, tensor in tensors:
            use = self._uses.clash(tensor, writes=role == "out")
            if use is not None:
                raise ArgumentError(
                    f"{self.ring._describe(call.collective)}: {role} shares memory with {use.what} "
                    f"of this group, and one of them is written, so that the values would depend "
                    f"on timing; expected separate memory, because the calls of a group run at the "
                    f"same time; pass another tensor, or make this call after the group"
                )
        for role, tensor in tensors:
            label = f"{role} of call {len(self.calls) + 1} ({call.collective})"
            self._uses.add(tensor, writes=role == "out", what=label)

    def _seen(self, again: Callable[[], Any]) -> Iterator[Seen]:
        """Yield the calls as observers see them; the first one makes all of them again."""
        for call in self.calls:
            leads = call is self.calls[0]
            redo = again if leads else _nothing
            yield Seen(self.ring, call.collective, call.out, call.x, call.args, redo, leads)

    def leave(self) -> None:
        """Launch everything as one operation."""
        if not self.calls:
            self.work._pending = None
            return
        try:
            if observers and looking_on():
                with watched(self._seen(self._launch)):
                    done = self._launch()
            elif under_mode():  # the mode has seen the operators one by one
                with unwatched():
                    done = self._launch()
            else:
                done = self._launch()
        except Exception as error:
            self.work._pending = Unlaunched(error)
            raise
        except BaseException:  # a signal; the launch has said so to the ring
            self.work._pending = Unlaunched(self.ring._health.unusable("group"))
            raise
        self.work._pending = done._pending if isinstance(done, Work) else None

    def _launch(self) -> Any:
        calls = compare(self.ring, self.calls) if self.ring._compares else self.calls
        return issue(self.ring, "group", calls, None, self.mode)


@contextmanager
def group(
    ring: Ring, use_calc_stream: bool, sync_op: bool, timeout: Seconds | None = None
) -> Iterator[Work]:
    """Collect the calls of a ``with`` block; an exception inside launches none of them."""
    seconds = None if timeout is None else call_deadline(ring, "group", timeout).seconds
    if use_calc_stream and not sync_op:
        raise ArgumentError(async_unsupported(ring, "group"))
    if ring._open_group is not None:
        raise ArgumentError(f"{ring._describe('group')}: a group is open already; leave it first")
    opened, thread = Group(ring, use_calc_stream, sync_op, seconds), get_ident()
    outer = ring._groups.get(thread)  # of the code whose backward opens this one
    ring._groups[thread] = opened
    try:
        yield opened.work
    except BaseException:
        none = f"{ring._describe('group')}: an exception left the group; none of it was launched"
        opened.work._pending = Unlaunched(ArgumentError(none))
        raise
    finally:
        if outer is None:
            del ring._groups[thread]
        else:
            ring._groups[thread] = outer
    limit = opened.work._limit = None if seconds is None else Deadline(seconds)
    opened.leave()
    wait_if_sync(ring, "group", opened.work, sync_op)
    if limit is not None and sync_op:
        await_stream(ring, "group", opened.mode, limit)


def needs_result(
    ring: Ring,
    collective: str,
    instead: str = "call the ring's plain collective inside, with x.detach()",
) -> None:
    """Refuse an operator that computes with a collective's result while a group is open.

    Call it in every operator that does more than to return what one collective gives.

    Args:
        ring: The ring of the collective.
        collective: The operator, as the user knows it.
        instead: What the user can do besides calling it outside the group.

    Raises:
        ArgumentError: The calling code is inside the block of a group of ``ring``.
    """
    if ring._open_group is not None:
        raise ArgumentError(
            f"{ring._describe(collective)}: a call inside `with ring.group():` that needs a "
            f"result at once "
            f"(an operator that computes with it, or an x that requires grad); results "
            f"are there after the block only: call it outside the group, or {instead}"
        )


def _nothing() -> None:
    """Do nothing."""
