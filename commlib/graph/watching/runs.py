"""The run that a thread makes of a captured function: warm-up, capture or verification.

A run calls the program's own code, and that calls functions that are marked with ``eager``. Nothing
can be passed through the program's code, so a marked function asks for the run that its thread
makes. Everything else gets what it needs as arguments.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from commlib.core import observers
from commlib.errors import GraphError
from commlib.graph.python.iterators import Positions
from commlib.graph.python.python_state import PythonState
from commlib.graph.watching.effects import Effects
from commlib.graph.watching.garbage import collection
from commlib.graph.watching.real_call import RealCall
from commlib.graph.watching.undo import UndoLog
from commlib.streams import capturing

EagerPart = Callable[[], Any]  # a marked function with its arguments


class Run(Protocol):
    """A run of a captured function for its capture or its verification."""

    def eager_part(self, part: EagerPart) -> Any:
        """Return ``part()``, which the run has met."""


class _Thread(threading.local):
    run: Run | None = None


_thread = _Thread()
_watched: "list[WarmUpRun]" = []  # under way in any thread


def current() -> Run | None:
    """Return the run that this thread makes, if any."""
    return _thread.run


@contextmanager
def under_way(run: Run | None) -> Iterator[None]:
    """Make ``run`` the current one of this thread inside a ``with`` block."""
    before, _thread.run = _thread.run, run
    try:
        yield
    finally:
        _thread.run = before


def inside() -> bool:
    """Return True if this thread works for a run, as the threads of a backward in it do.

    When no mode is active, autograd threads are recognised as non-Python threads.
    """
    if _thread.run is not None or (observers.observers and observers.looking_on()):
        return True
    return bool(_watched) and isinstance(threading.current_thread(), threading._DummyThread)


def check_foreign() -> None:
    """Raise ``GraphError`` for a capture that begins inside a capture of the program."""
    if capturing():
        raise GraphError("a capture can't begin inside another one; make this call once before it")


def call_apart(part: EagerPart, undo: UndoLog) -> Any:
    """Return ``part()``, called without observers; ``undo`` notes what it changes."""
    with under_way(None), observers.unwatched(), collection():
        return RealCall(torch.device("cpu"), (), undo=undo).run(part)


class WarmUpRun:
    """A run of a function before its capture; ``undo`` notes what its eager parts change."""

    def __init__(self, undo: UndoLog, roots: Sequence[object] = ()) -> None:
        """``roots``: what leads to the Python objects that eager parts may change."""
        self.broken = False  # whether it has met an eager part
        self.changed: dict[tuple[int, str], Any] = {}  # what eager parts bind names to
        self.positions: Positions | None = None  # of generators that eager parts may draw from
        self._undo, self._roots = undo, roots

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Mark this thread as making the run, inside a ``with`` block."""
        _watched.append(self)
        before, _thread.run = _thread.run, self
        try:
            yield
        finally:
            _thread.run = before
            _watched.remove(self)

    def eager_part(self, part: EagerPart) -> Any:
        """Return ``part()``, and record which names it binds."""
        self.broken = True
        before = PythonState(self._roots)
        if self.positions is not None:
            self.positions.note_draws()
        found = call_apart(part, self._undo)
        if self.positions is not None:
            self.positions.begin_draws()
        self.changed |= {(change.where, change.name): change.now for change in before.changes()}
        return found


class DonePart:
    """An eager part of a verified call: what it returned, and what it left."""

    def __init__(self, part: EagerPart) -> None:
        self._undo = UndoLog()
        self.result = call_apart(part, self._undo)
        self._kept = tree_map_only(torch.Tensor, torch.Tensor.clone, self.result)
        self.effects = self._undo.effects()
        self._left = self.effects.now()

    def restore(self) -> None:
        """Put back what the part has changed."""
        self._undo.restore()

    def again(self) -> Any:
        """Change it once more, and return what the part returned."""
        self.effects.put(self._left)
        return self._kept


def name_of(part: EagerPart) -> str:
    """Return the name of a marked function."""
    return str(getattr(getattr(part, "func", part), "__qualname__", ""))


def do_again(done: list[DonePart], part: EagerPart) -> Any:
    """Repeat the effects of the next of ``done`` in place of ``part``; return its result."""
    if not done:
        raise GraphError(f"{name_of(part)}, an eager part, was not called by the function")
    return done.pop(0).again()


class VerifiedRun:
    """A real call whose graph is replayed after it: eager parts run in the real call alone."""

    def __init__(self, roots: Sequence[object] = ()) -> None:
        """``roots``: what leads to the Python objects that eager parts may change."""
        self.changed: set[tuple[int, str]] = set()  # by eager parts
        self.parts: list[DonePart] = []
        self._roots = roots

    def eager_part(self, part: EagerPart) -> Any:
        """Return ``part()``, and keep its effects."""
        before = PythonState(self._roots)
        self.parts.append(DonePart(part))
        self.changed |= {(change.where, change.name) for change in before.changes()}
        return self.parts[-1].result

    def effects(self) -> Sequence[Effects]:
        """Return what the parts have changed."""
        return [part.effects for part in self.parts]

    def restore(self) -> None:
        """Put back what the parts have changed."""
        for part in reversed(self.parts):
            part.restore()

    def again(self) -> None:
        """Change it once more."""
        for part in self.parts:
            part.again()
