"""A captured call in segments: graphs, and the parts between them that must stay outside."""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from commlib.core import observers
from commlib.errors import GraphError
from commlib.graph.backend import Backend, Pool, Recording
from commlib.graph.cache_key import value
from commlib.graph.capture_query import reporting
from commlib.graph.effects import Effects
from commlib.graph.python_state import PythonState
from commlib.graph.real_call import RealCall
from commlib.graph.recorder import Collective, Recorder
from commlib.graph.undo import UndoLog
from commlib.streams import capturing

F = TypeVar("F", bound=Callable[..., Any])
_making = threading.local()
_runs: "list[Warming]" = []  # before a capture, under way in any thread


def making() -> "Segments | Warming | Verifying | None":
    """Return what this thread is warming up or capturing, if anything."""
    found: Segments | Warming | Verifying | None = getattr(_making, "now", None)
    return found


def inside() -> bool:
    """Whether this thread works for a warm-up or a capture, as a backward's threads do.

    These have the mode of whatever watches; where nothing does, they are known by not being ours.
    """
    if making() is not None or (observers.observers and observers.looking_on()):
        return True
    return bool(_runs) and isinstance(threading.current_thread(), threading._DummyThread)


def check_foreign() -> None:
    """Refuse to begin a capture inside one that is not ours."""
    if capturing():
        raise GraphError("a capture can't begin inside another one; make this call once before it")


@contextmanager
def _now(what: "Segments | Warming | Verifying | None") -> Iterator[None]:
    before, _making.now = making(), what
    try:
        yield
    finally:
        _making.now = before


# The hooks that autograd would call for what is saved now; None where there are none.
_saved_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: None
)


@contextmanager
def apart() -> Iterator[None]:
    """Run apart from what the caller's modes do with tensors on their way.

    Autocast would reuse its casts of weights, and a graph go on reading an old one. Hooks on what
    autograd saves (checkpoints, offloading) count and move it: no backward of theirs will need it.
    """
    torch.clear_autocast_cache()
    hooked = _saved_hooks(True) is not None
    hooks = torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)
    try:
        with hooks if hooked else nullcontext():
            yield
    finally:
        torch.clear_autocast_cache()


def _unchanged(x: Any) -> Any:
    return x


class EagerSegment:
    """An eager part: called at every replay, its tensors copied to where the graph reads them."""

    nodes = nbytes = 0
    reads: str | None = None

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
        leaves: Sequence[torch.Tensor],
        undo: UndoLog | None,
    ) -> None:
        """Call ``fn``; ``undo`` notes what it changes, where that is to be put back.

        ``leaves``: those whose gradients it may read, as the graphs before it have left them.
        """
        self._fn, self._name = functools.partial(fn, *args, **kwargs), fn.__qualname__
        self._grads = [(leaf, leaf.grad) for leaf in leaves]
        with torch.no_grad():
            self.result = self._call() if undo is None else _noted(self._fn, undo)
        self._kept = tree_leaves(self.result)

    def _call(self) -> Any:
        """Call it, or do again what it did in the real call that is being verified."""
        parts: list[_Done] | None = getattr(_making, "parts", None)
        if parts is None:
            return self._fn()
        if not parts:
            raise GraphError(f"{self._name}, an eager part, was not called by the function")
        return parts.pop(0).again()

    def replay(self) -> None:
        """Call it again. Raises ``GraphError`` where the graph can't take what it returns."""
        for leaf, grad in self._grads:
            if leaf.grad is not grad:
                leaf.grad = grad
        with torch.no_grad():
            found = tree_leaves(self._call())
            if list(map(_shape, found)) != list(map(_shape, self._kept)):
                raise GraphError(
                    f"{self._name}, an eager part, returns something else than at the capture, "
                    f"where the graph has its shapes and plain values; return tensors of one shape "
                    f"and dtype, or nothing, or make the values part of key="
                )
            for kept, new in zip(self._kept, found, strict=True):
                if isinstance(kept, torch.Tensor) and kept is not new:
                    kept.copy_(new)

    def release(self) -> None:
        """Keep nothing."""
        self._kept, self._grads = [], []


def _noted(fn: Callable[[], Any], undo: UndoLog) -> Any:
    """Return ``fn()``, outside what is watched; ``undo`` notes what it changes."""
    with _now(None), observers.unwatched():
        return RealCall(torch.device("cpu"), (), undo=undo).run(fn)


class _Done:
    """An eager part of a real call: what it returned, and what it left."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._undo = UndoLog()
        self.result = _noted(fn, self._undo)
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


_PLAIN = (bool, int, float, complex, str, type(None))  # what a program computes with


def _shape(x: Any) -> Any:
    """Return what a graph has fixed of what an eager part returns."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype, x.device
    return value(x) if isinstance(x, _PLAIN) else type(x)


class Segments:
    """What one capture is made of, in order."""

    def __init__(
        self, engine: Backend, generators: list[torch.Generator], pool: Pool | None
    ) -> None:
        self._engine, self._generators, self._pool = engine, generators, pool
        self.device = engine.device
        self.turn, self.lock = engine.turn, engine.lock  # held from one to the end of a replay
        self.join = engine.join
        self.parts: list[Recording] = []
        self.recorders: list[Recorder] = []
        self.own = 0  # operators of the function itself; copies of its outputs follow
        self.broken = False  # whether parts lie outside, so that the capture has already run
        self.leaves: Sequence[torch.Tensor] = ()  # whose gradients parts outside may read
        self.reports_capture = True  # the answer when the function asks whether it is captured
        self.before: dict[int, StorageWeakRef] = {}  # constants of the forward, in a backward
        self.empty: set[int] = set()  # memory that the function fills and empties again
        self.undo: UndoLog | None = None  # of what these change, where that does not count

    def make(self, fn: Callable[[], Any]) -> Any:
        """Capture ``fn`` and return its result; an exception leaves nothing captured."""
        with self.being_made():
            return fn()

    @contextmanager
    def being_made(self) -> Iterator[None]:
        """Capture what runs inside a ``with`` block."""
        check_foreign()
        with _now(self), reporting(self.reports_capture):
            self._open()
            try:
                with apart():
                    yield
                self.parts.append(self._engine.end())
            except BaseException:
                self._engine.fail()
                self.release()
                raise

    def _open(self) -> None:
        self.recorders.append(self._engine.begin(self._generators, self._pool))
        self.recorders[-1].constants, self.recorders[-1].empty = self.before, self.empty

    def leave(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """End a graph, let it run, call ``fn`` outside, and begin the next."""
        grads = [(leaf, leaf.grad) for leaf in self.leaves]
        self.parts.append(self._engine.end())
        for leaf, grad in grads:  # which the end of a graph has put back
            leaf.grad = grad
        if not self.broken:  # an eager part may wait for another thread's replays
            self.broken, self.lock = True, threading.RLock()
        self._one(self.parts[-1])
        part = EagerSegment(fn, args, kwargs, self.leaves, self.undo)
        self.parts.append(part)
        self._open()
        return part.result

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor is the graphs' own."""
        return self.made(tensor.untyped_storage()._cdata)

    def made(self, key: int) -> bool:
        """Return True if the memory that ``key`` names is the graphs' own."""
        return any(key in recorder.made for recorder in self.recorders)

    @property
    def collectives(self) -> list[Collective]:
        """Every collective of the graphs, in order."""
        return [call for recorder in self.recorders for call in recorder.collectives]

    @property
    def reads(self) -> str | None:
        """Return where the host reads a value that the graphs fit alone, if it does."""
        return next((part.reads for part in self.parts if part.reads), None)

    @property
    def constants(self) -> dict[int, StorageWeakRef]:
        """Return memory of the graphs' own on the host that holds the same at each call."""
        found: dict[int, StorageWeakRef] = {}
        for recorder in self.recorders:
            if recorder.host is not None:
                keys = recorder.host.constants & recorder.made.keys()
                found |= {key: recorder.made[key] for key in keys}
        return found

    def replay(self) -> None:
        """Run all of it on the current stream; the host waits for eager parts only."""
        if not self.broken:
            for part in self.parts:
                part.replay()
            return
        for part in self.parts:
            if isinstance(part, EagerSegment):
                part.replay()
            else:
                self._one(part)

    def replay_rest(self) -> None:
        """Run what the capture itself has not: after an eager part, the last graph."""
        if self.broken:
            self._one(self.parts[-1])
        else:
            self.replay()

    def _one(self, graph: Recording) -> None:
        with self._engine.lock:
            self.turn()
            graph.replay()

    def release(self) -> None:
        """Release every graph; a replay raises from then on."""
        for part in self.parts:
            part.release()
        self.parts, self.replay = [], _gone  # type: ignore[method-assign]  # no test at a replay


def _gone() -> None:
    raise GraphError("this graph was released and can't be replayed")


class Warming:
    """A run of a function before its capture; ``undo`` notes what its eager parts change."""

    def __init__(self, undo: UndoLog, roots: Iterable[object] = ()) -> None:
        """``roots``: what leads to the Python objects that eager parts may change."""
        self.broken = False  # whether it has met an eager part
        self.changed: dict[tuple[int, str], Any] = {}  # what eager parts bind names to
        self._undo, self._roots = undo, roots

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Mark this thread as making the run, inside a ``with`` block."""
        _runs.append(self)
        try:
            with _now(self):
                yield
        finally:
            _runs.remove(self)

    def call(self, fn: Callable[[], Any]) -> Any:
        """Return ``fn()``, an eager part."""
        self.broken = True
        before = PythonState(self._roots)
        found = _noted(fn, self._undo)
        self.changed |= {(change.where, change.name): change.now for change in before.changes()}
        return found


class Verifying:
    """A real call whose graph is replayed after it: eager parts run in the real call alone."""

    def __init__(self, roots: Iterable[object] = ()) -> None:
        """``roots``: what leads to the Python objects that eager parts may change."""
        self.changed: set[tuple[int, str]] = set()  # by eager parts
        self._parts: list[_Done] = []
        self._roots = roots

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Keep what eager parts do inside a ``with`` block."""
        with _now(self):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Have the graph's eager parts do the same again inside a ``with`` block."""
        _making.parts = list(self._parts)
        try:
            yield
        finally:
            _making.parts = None

    def call(self, fn: Callable[[], Any]) -> Any:
        """Return ``fn()``, an eager part."""
        before = PythonState(self._roots)
        self._parts.append(_Done(fn))
        self.changed |= {(change.where, change.name) for change in before.changes()}
        return self._parts[-1].result

    @property
    def parts(self) -> bool:
        """Return whether the call has met eager parts."""
        return bool(self._parts)

    def effects(self) -> list[Effects]:
        """Return what the parts have changed."""
        return [part.effects for part in self._parts]

    def restore(self) -> None:
        """Put back what the parts have changed."""
        for part in reversed(self._parts):
            part.restore()

    def again(self) -> None:
        """Change it once more."""
        for part in self._parts:
            part.again()


def eager(fn: F) -> F:
    """Mark a function that must stay outside any graph; usable as a decorator.

    A capture that meets it is made in segments: it ends there, the function runs eagerly (it may
    read values on the host, and branch), and a new graph begins after it. Its tensors must keep
    their shapes; no gradient flows through it. EagerSegment a capture it changes nothing.
    """

    @functools.wraps(fn)
    def outside(*args: Any, **kwargs: Any) -> Any:
        now = making()
        if isinstance(now, Segments):
            return now.leave(fn, args, kwargs)
        if now is not None:
            return now.call(functools.partial(fn, *args, **kwargs))
        if observers.observers and observers.refusing():
            raise GraphError(f"{fn.__qualname__} is an eager part, and runs in a backward")
        return fn(*args, **kwargs)

    return outside  # type: ignore[return-value]  # the same signature
