"""Who looks on while collectives are made: a graph that is being captured, or the run before it."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from commlib._ring import Ring
from commlib._work import Work


class Seen(NamedTuple):
    """A call as an observer is told of it before its launch; ``again()`` makes it once more."""

    ring: Ring
    verb: str
    out: torch.Tensor | None
    x: torch.Tensor | None
    args: tuple[Any, ...]
    again: Callable[[], Any]


class Observer(Protocol):
    """A mode of torch that has to know of every call under it: a graph that is being captured."""

    def before(self, call: Seen) -> None:
        """Note a call; an exception keeps it from being launched."""


observers: list[Observer] = []  # of all threads: empty, there is nothing to ask at a call
_inside = threading.local()


def looking_on() -> tuple[Observer, ...]:
    """Return the observers of what this thread does; a backward's threads have their caller's."""
    here = (*_get_current_dispatch_mode_stack(), *getattr(_inside, "observers", ()))
    return tuple(observer for observer in observers if any(observer is mode for mode in here))


@contextmanager
def still_watched(observer: Observer) -> Iterator[None]:
    """Let an observer look on inside an operator that it handles, where torch has taken it off."""
    with _being(observers=(*getattr(_inside, "observers", ()), observer)):
        yield


@contextmanager
def unwatched() -> Iterator[None]:
    """Let nobody look on: no observer, and no mode of torch that a recording uses."""
    with _being(observers=()), _disable_current_modes():
        yield


@contextmanager
def watched(calls: Iterable[Seen]) -> Iterator[None]:
    """Tell all observers of calls; what these do inside is their own business, not theirs."""
    here = looking_on()
    with unwatched():
        for seen in calls:
            for observer in here:
                observer.before(seen)
        yield


@contextmanager
def unwaited() -> Iterator[list[Work]]:
    """Keep the works that this thread's calls begin, for whoever has to wait for all of them."""
    works: list[Work] = []
    with _being(works=works):
        yield works


def begun(work: Work) -> Work:
    """Note a work for whoever has to wait for all; returns it."""
    works = getattr(_inside, "works", None)
    if works is not None:
        works.append(work)
    return work


@contextmanager
def _being(**values: Any) -> Iterator[None]:
    """Change values of this thread inside a ``with`` block."""
    before = dict(_inside.__dict__)
    _inside.__dict__.update(values)
    try:
        yield
    finally:
        _inside.__dict__.clear()
        _inside.__dict__.update(before)
