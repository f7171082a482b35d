"""A captured call in pieces: graphs, and the parts between them that must stay outside."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from commlib import _observers
from commlib._streams import capturing
from commlib.errors import GraphError
from commlib.graph.engine import Engine, Pool, Recording
from commlib.graph.ledger import Collective, Ledger
from commlib.graph.signature import value

F = TypeVar("F", bound=Callable[..., Any])
_making = threading.local()
_runs: "list[Warming]" = []  # before a capture, under way in any thread


def making() -> "Pieces | Warming | None":
    """Return what this thread is warming up or capturing, if anything."""
    found: Pieces | Warming | None = getattr(_making, "now", None)
    return found


def inside() -> bool:
    """Whether this thread works for a warm-up or a capture, as a backward's threads do.

    These have the mode of whatever watches; where nothing does, they are known by not being ours.
    """
    if making() is not None or (_observers.observers and _observers.looking_on()):
        return True
    return bool(_runs) and isinstance(threading.current_thread(), threading._DummyThread)


def refuse_foreign() -> None:
    """Refuse to begin a capture inside one that is not ours."""
    if capturing():
        raise GraphError("a capture can't begin inside another one; make this call once before it")


@contextmanager
def _now(what: "Pieces | Warming") -> Iterator[None]:
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


class Outside:
    """An eager part: called at every replay, its tensors copied to where the graph reads them."""

    nodes = nbytes = 0

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
        self._call, self._name = functools.partial(fn, *args, **kwargs), fn.__qualname__
        with torch.no_grad():
            self.result = self._call()
        self._kept = tree_leaves(self.result)

    def replay(self) -> None:
        """Call it again. Raises ``GraphError`` where the graph can't take what it returns."""
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
        self._kept = []


_PLAIN = (bool, int, float, complex, str, type(None))  # what a program computes with


def _shape(x: Any) -> Any:
    """Return what a graph has fixed of what an eager part returns."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype, x.device
    return value(x) if isinstance(x, _PLAIN) else type(x)


class Pieces:
    """What one capture is made of, in order."""

    def __init__(
        self, engine: Engine, generators: list[torch.Generator], pool: Pool | None
    ) -> None:
        self._engine, self._generators, self._pool = engine, generators, pool
        self.turn, self.lock = engine.turn, engine.lock  # held from one to the end of a replay
        self.parts: list[Recording] = []
        self.ledgers: list[Ledger] = []
        self.own = 0  # operators of the function itself; copies of its outputs follow
        self.broken = False  # whether parts lie outside, so that the capture has already run

    def make(self, fn: Callable[[], Any]) -> Any:
        """Capture ``fn`` and return its result; an exception leaves nothing captured."""
        with self.being_made():
            return fn()

    @contextmanager
    def being_made(self) -> Iterator[None]:
        """Capture what runs inside a ``with`` block."""
        refuse_foreign()
        with _now(self):
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
        self.ledgers.append(self._engine.begin(self._generators, self._pool))

    def leave(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """End a graph, let it run, call ``fn`` outside, and begin the next."""
        self.parts.append(self._engine.end())
        if not self.broken:  # an eager part may wait for another thread's replays
            self.broken, self.lock = True, threading.RLock()
        self._one(self.parts[-1])
        part = Outside(fn, args, kwargs)
        self.parts.append(part)
        self._open()
        return part.result

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor is the graphs' own."""
        key = tensor.untyped_storage()._cdata
        return any(key in ledger.made for ledger in self.ledgers)

    @property
    def collectives(self) -> list[Collective]:
        """Every collective of the graphs, in order."""
        return [call for ledger in self.ledgers for call in ledger.collectives]

    def replay(self) -> None:
        """Run all of it on the current stream; the host waits for eager parts only."""
        if not self.broken:
            for part in self.parts:
                part.replay()
            return
        for part in self.parts:
            if isinstance(part, Outside):
                part.replay()
            else:
                self._one(part)

    def replay_rest(self) -> None:
        """Run what the capture itself has not: behind an eager part, the last graph."""
        if self.broken:
            self._one(self.parts[-1])
        else:
            self.replay()

    def _one(self, graph: Recording) -> None:
        with self._engine.lock:
            self.turn()
            graph.replay()

    def release(self) -> None:
        """Let go of every graph; a replay raises from then on."""
        for part in self.parts:
            part.release()
        self.parts, self.replay = [], _gone  # type: ignore[method-assign]  # no test at a replay


def _gone() -> None:
    raise GraphError("this graph was let go of and can't be replayed")


class Warming:
    """A run of a function before its capture."""

    def __init__(self) -> None:
        self.broken = False  # whether it has met an eager part

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Mark this thread as making the run, inside a ``with`` block."""
        _runs.append(self)
        try:
            with _now(self):
                yield
        finally:
            _runs.remove(self)


def eager(fn: F) -> F:
    """Mark a function that must stay outside any graph; usable as a decorator.

    A capture that meets it is made in pieces: it ends there, the function runs eagerly (it may
    read values on the host, and branch), and a new graph begins behind it. Its tensors must keep
    their shapes; no gradient flows through it. Outside a capture it changes nothing.
    """

    @functools.wraps(fn)
    def outside(*args: Any, **kwargs: Any) -> Any:
        now = making()
        if isinstance(now, Pieces):
            return now.leave(fn, args, kwargs)
        if now is None:
            if _observers.observers and _observers.looking_on():
                raise GraphError(f"{fn.__qualname__} is an eager part, and runs in a backward")
            return fn(*args, **kwargs)
        now.broken = True
        with _observers.unwatched():
            return fn(*args, **kwargs)

    return outside  # type: ignore[return-value]  # the same signature
