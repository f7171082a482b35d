"""Observers of collectives: a capture in progress, or the run before it."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from commlib.core.compiler import untraced
from commlib.core.ring import Ring
from commlib.core.work import Pending, Work
from commlib.deadlines import Deadline
from commlib.streams import capturing


class Seen(NamedTuple):
    """A call as an observer sees it before its launch.

    ``again()`` repeats it, and returns a ``Work`` if the call did. ``leads`` is False for further
    calls of a group, which the first call of the group repeats.
    """

    ring: Ring
    collective: str
    out: torch.Tensor | None
    x: torch.Tensor | None
    args: tuple[Any, ...]
    again: Callable[[], Any]
    leads: bool = True


class Observer(Protocol):
    """A mode of torch that sees every call under it: a capture in progress.

    ``refuses``: raise for what a graph can't contain.
    """

    refuses: bool

    def before(self, call: Seen) -> None:
        """Note a call; an exception keeps it from being launched."""

    def before_read(self, tensor: torch.Tensor, name: str) -> None:
        """Note that the method ``name`` reads the values of ``tensor`` past torch's operators."""


observers: list[Observer] = []  # of all threads: empty, there is nothing to ask at a call


class _Inside(threading.local):
    """State of one thread, which it asks about itself.

    Attributes:
        observers: Those that look on where torch has taken them off.
        recording: The one whose run this is, whatever torch does with its modes.
        works: What this thread's calls begin, for the code that waits for all of them.
    """

    observers: tuple[Observer, ...] = ()
    recording: Observer | None = None
    works: list[Work] | None = None


inside = _Inside()


def looking_on() -> tuple[Observer, ...]:
    """Return the observers of what this thread does; a backward's threads have their caller's."""
    active = (*_get_current_dispatch_mode_stack(), *inside.observers)
    return tuple(observer for observer in observers if any(observer is mode for mode in active))


def captured() -> bool:
    """Return True if the calls here are captured, by a CUDA stream or a recording on a CPU."""
    return inside.recording is not None or capturing()


def refusing() -> bool:
    """Return True if an observer of this thread raises for what a graph can't contain."""
    return any(observer.refuses for observer in looking_on())


class still_watched:  # a context like the functions here, entered at every operator
    """Let an observer look on inside an operator that it handles, where torch has taken it off."""

    __slots__ = ("_before", "_observer")

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __enter__(self) -> None:
        self._before = inside.observers, inside.recording
        inside.observers = (*inside.observers, self._observer)
        inside.recording = None  # the operator runs again, and reads again

    def __exit__(self, *_: object) -> None:
        inside.observers, inside.recording = self._before


@contextmanager
def unwatched() -> Iterator[None]:
    """Hide the calls inside from observers and from the modes of torch that a recording uses.

    torch.compile leaves a function alone under such a mode, and would trace ours inside here.
    """
    with _being(observers=(), recording=None), untraced(_disable_current_modes()):
        yield


@contextmanager
def watched(calls: Iterable[Seen]) -> Iterator[None]:
    """Notify all observers of calls. Calls made by an observer are not observed."""
    active = looking_on()
    with unwatched():
        for seen in calls:
            for observer in active:
                observer.before(seen)
        yield


@contextmanager
def unwaited() -> Iterator[list[Work]]:
    """Keep the works that this thread's calls begin, for the code that waits for all of them."""
    works: list[Work] = []
    before, inside.works = inside.works, works
    try:
        yield works
    finally:
        inside.works = before


def finished(fn: Callable[[], Any]) -> Any:
    """Return ``fn()``; every work that it began has ended."""
    with unwaited() as works:
        result = fn()
    for work in works:
        work.wait()
    return result


def begun(work: Work) -> Work:
    """Note a work for the caller that waits for all of them; returns it.

    What waiting for it does is a part of its call, and nothing that an observer should see again.
    """
    works = inside.works
    if works is not None:
        works.append(work)
    if observers and work._pending is not None:
        work._pending = _Unwatched(work._pending)
    return work


class _Unwatched:
    """A pending result whose wait is not observed."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def join(self, deadline: Deadline | None = None) -> None:
        """Make the result safe to use for the caller."""
        with unwatched():
            self._pending.join(deadline)

    def done(self) -> bool:
        """Return True if the result is there already; never blocks."""
        return self._pending.done()


@contextmanager
def _being(**values: Any) -> Iterator[None]:
    """Change values of this thread inside a ``with`` block."""
    before = dict(inside.__dict__)
    inside.__dict__.update(values)
    try:
        yield
    finally:
        inside.__dict__.clear()
        inside.__dict__.update(before)
