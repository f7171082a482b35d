"""Who looks on while collectives are made: a graph that is being captured, or the run before it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from commlib._ring import Ring
from commlib._work import Work


class Inherited:
    """A value of a thread, None at first, that the threads of its backward have too."""

    def __init__(self, name: str) -> None:
        self._name = f"commlib.{name}"

    def get(self) -> Any:
        """Return the value here."""
        return torch._C._get_obj_in_tls(self._name) if _known(self._name) else None

    def set(self, value: Any) -> None:
        """Change it here."""
        torch._C._stash_obj_in_tls(self._name, value)

    @contextmanager
    def being(self, value: Any) -> Iterator[None]:
        """Change it inside a ``with`` block."""
        before = self.get()
        self.set(value)
        try:
            yield
        finally:
            self.set(before)


_known: Callable[[str], bool] = torch._C._is_key_in_tls


class Seen(NamedTuple):
    """A call as an observer is told of it before its launch; ``again()`` makes it once more."""

    ring: Ring
    verb: str
    out: torch.Tensor | None
    x: torch.Tensor | None
    args: tuple[Any, ...]
    again: Callable[[], Any]


class Observer(Protocol):
    """Whoever has to know of every call while it looks on: a graph that is being captured."""

    def before(self, call: Seen) -> None:
        """Note a call; an exception keeps it from being launched."""


observers: list[Observer] = []  # of all threads: empty, there is nothing to ask at a call
_here, _works = Inherited("observers"), Inherited("works")


def looking_on() -> tuple[Observer, ...]:
    """Return the observers of what this thread does."""
    return _here.get() or ()


@contextmanager
def watching(observer: Observer) -> Iterator[None]:
    """Let an observer look on at this thread, and at its backwards."""
    observers.append(observer)
    try:
        with _here.being((*looking_on(), observer)):
            yield
    finally:
        observers.remove(observer)


@contextmanager
def unwatched() -> Iterator[None]:
    """Let nobody look on: no observer, and no mode of torch that a recording uses."""
    with _here.being(()), _disable_current_modes():
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
    """Keep the works that calls begin, for whoever has to wait for all of them."""
    works: list[Work] = []
    with _works.being(works):
        yield works


def begun(work: Work) -> Work:
    """Note a work for whoever has to wait for all; returns it."""
    works = _works.get()
    if works is not None:
        works.append(work)
    return work
