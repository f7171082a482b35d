"""The run that a thread makes of a captured function: warm-up, capture or verification.

A run calls the program's own code, and that calls functions that are marked with ``eager``. Nothing
can be passed through the program's code, so a marked function asks for the run that its thread
makes. Everything else gets what it needs as arguments.
"""

import copy
import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from commlib.core import observers
from commlib.core.memory import span
from commlib.core.tensors import parts
from commlib.errors import GraphError
from commlib.graph.operators.layout import fill
from commlib.graph.operators.schema import memory
from commlib.graph.python.iterators import Positions
from commlib.graph.python.python_state import PythonState
from commlib.graph.watching.effects import Effects
from commlib.graph.watching.garbage import collection
from commlib.graph.watching.real_call import RealCall
from commlib.graph.watching.undo import UndoLog
from commlib.streams import capturing

EagerPart = partial[Any]  # a marked function with its arguments


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


class Called(NamedTuple):
    """The result of an eager part, and its writes.

    Attributes:
        result: What it returned.
        own: Of each leaf of the result, whether it is a tensor that the part has made.
        written: The memory that it has written to.
    """

    result: Any
    own: Sequence[bool]
    written: Set[int]

    def writes(self, x: Any) -> bool:
        """Return True for a tensor that it has written to."""
        return isinstance(x, torch.Tensor) and not self.written.isdisjoint(memory_in(x))


def memory_in(x: torch.Tensor) -> list[int]:
    """Return the memory of a tensor, or of what it holds."""
    return [memory(part) for part in parts(x)]


def arguments_of(part: EagerPart) -> list[Any]:
    """Return the leaves of its arguments."""
    return tree_leaves((part.args, part.keywords))


def call_apart(part: EagerPart, undo: UndoLog | None) -> Called:
    """Call ``part`` without observers; ``undo`` notes what it changes, where that is put back."""
    with under_way(None), observers.unwatched(), collection():
        call = RealCall(torch.device("cpu"), (), copies=undo is not None, undo=undo)
        result = call.run(part)
    return Called(result, [_has_made(call, x) for x in tree_leaves(result)], call.written)


def _has_made(call: RealCall, x: Any) -> bool:
    """Return True for a tensor that a call has made, or that is over the memory of an array."""
    if not isinstance(x, torch.Tensor):
        return False
    storages = [part.untyped_storage() for part in parts(x) if memory(part)]
    return all(call.has_made(each) or not each.resizable() for each in storages)


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
        result = call_apart(part, self._undo).result
        if self.positions is not None:
            self.positions.begin_draws()
        self.changed |= {(change.where, change.name): change.now for change in before.changes()}
        return result


class DonePart:
    """An eager part of a verified call: what it returned, and what it left."""

    def __init__(self, part: EagerPart, reachable: Sequence[torch.Tensor]) -> None:
        """Call ``part``; ``reachable``: tensors whose gradients it may change."""
        self._undo, self._given = UndoLog(), arguments_of(part)
        called = call_apart(part, self._undo)
        self.result = called.result
        self.effects = self._undo.effects()
        self._left = self.effects.now()
        self._lasting = {key for x in reachable for key in memory_in(x)} - {0}
        self._leaves = list(zip(tree_leaves(self.result), called.own, strict=True))
        self._copies = _copied(self.result)
        self._written = [(i, x.clone()) for i, x in enumerate(self._given) if called.writes(x)]
        grads = [(x, x.grad) for x in reachable if x.is_leaf and x.requires_grad]
        self._grads = [(x, g, g.clone()) for x, g in grads if g is not None and called.writes(g)]

    def restore(self) -> None:
        """Put back what the part has changed."""
        self._undo.restore()

    def again(self) -> None:
        """Change it once more."""
        self.effects.put(self._left)

    def again_for(self, part: EagerPart) -> Called:
        """Change it once more, and what ``part`` has in its place; return what the part returned.

        A graph gives the part other tensors, and leaves have other gradients in a replay.
        """
        self.again()
        args = arguments_of(part)
        if len(args) != len(self._given):
            raise GraphError(f"{name_of(part)}, an eager part, gets other arguments in its graph")
        pairs = [(args[i], self._given[i], content) for i, content in self._written]
        pairs += [(leaf.grad, grad, content) for leaf, grad, content in self._grads]
        for now, then, content in pairs:
            if isinstance(now, torch.Tensor) and now is not then:
                fill(now, content)
        copies, spec = tree_flatten(self._copies)
        passed = [self._passed_on(x, args, made=made) for x, made in self._leaves]
        leaves = [y if x is None else x for x, y in zip(passed, copies, strict=True)]
        made = [x is None and torch.is_tensor(y) for x, y in zip(passed, copies, strict=True)]
        written = {key for i, _ in self._written for key in memory_in(args[i])}
        return Called(tree_unflatten(leaves, spec), made, written)

    def _passed_on(self, x: Any, given: Sequence[Any], *, made: bool) -> torch.Tensor | None:
        """Return the tensor in place of ``x``: ``given``, a view of one, or one of the program.

        None for what the part has made, and for what the function has made and not given to it.
        """
        if not isinstance(x, torch.Tensor):
            return None
        pairs = [
            (then, now)
            for then, now in zip(self._given, given, strict=True)
            if isinstance(then, torch.Tensor) and isinstance(now, torch.Tensor)
        ]
        same = next((now for then, now in pairs if x is then), None)
        if same is not None or made:
            return same
        views = (_same_view(x, then, now) for then, now in pairs)
        view = next((view for view in views if view is not None), None)
        return x if view is None and not self._lasting.isdisjoint(memory_in(x)) else view


def _same_view(x: torch.Tensor, then: torch.Tensor, now: torch.Tensor) -> torch.Tensor | None:
    """Return the view of ``now`` that ``x`` is of ``then``; None if it is not a plain view."""
    if not memory(x) or memory(x) != memory(then):
        return None
    if now is then:
        return x
    (begin, end), (first, last) = span(then), span(x)
    plain = not any(y.is_conj() or y.is_neg() for y in (x, then, now))
    alike = x.dtype == then.dtype == now.dtype and then.stride() == now.stride()
    if not (plain and alike and begin <= first and last <= end):
        return None
    offset = x.storage_offset() - then.storage_offset() + now.storage_offset()
    return now.as_strided(x.size(), x.stride(), offset)


def _copied(result: Any) -> Any:
    """Return copies of tensors; those over the same memory are so again."""
    memo: dict[int, Any] = {}  # one copy of each memory
    return tree_map_only(torch.Tensor, lambda x: copy.deepcopy(x.detach(), memo), result)


def name_of(part: EagerPart) -> str:
    """Return the name of a marked function."""
    return str(getattr(part.func, "__qualname__", type(part.func).__qualname__))


def do_again(done: list[DonePart], part: EagerPart) -> Called:
    """Do what the next of ``done`` did, in place of ``part``."""
    if not done:
        raise GraphError(f"{name_of(part)}, an eager part, was not called by the function")
    return done.pop(0).again_for(part)


class VerifiedRun:
    """A real call whose graph is replayed after it: eager parts run in the real call alone."""

    def __init__(
        self, roots: Sequence[object] = (), reachable: Sequence[torch.Tensor] = ()
    ) -> None:
        """Store what eager parts may change.

        Args:
            roots: What leads to Python objects.
            reachable: Tensors, whose gradients they may change too.
        """
        self.changed: set[tuple[int, str]] = set()  # by eager parts
        self.parts: list[DonePart] = []
        self._roots, self._reachable = roots, reachable

    def eager_part(self, part: EagerPart) -> Any:
        """Return ``part()``, and keep its effects."""
        before = PythonState(self._roots)
        self.parts.append(DonePart(part, self._reachable))
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
