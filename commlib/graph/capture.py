"""`capture`: a function whose calls are replayed from graphs, one a key."""

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, TypedDict, overload

import torch
from typing_extensions import Unpack

from commlib._log import log
from commlib._manager import CommContextManager
from commlib.errors import CommError, GraphError
from commlib.graph import pool as pools
from commlib.graph.engine import Engine, HostEngine, Pool
from commlib.graph.entry import Entry
from commlib.graph.pieces import Pieces, inside, refuse_foreign
from commlib.graph.signature import Arguments, arguments, bare, value
from commlib.graph.slots import Slot, Slots
from commlib.graph.vote import AlreadyRun, same_key, settle
from commlib.graph.warmup import WarmUp, named

everything: "weakref.WeakSet[Graphed]" = weakref.WeakSet()


class Options(TypedDict, total=False):
    """What ``capture`` is told beside the function."""

    key: Callable[..., Any] | None
    warmup: int
    first: str
    outputs: str
    agree: int | None
    on_fail: str


@overload
def capture(fn: Callable[..., Any], **options: Unpack[Options]) -> "Graphed": ...


@overload
def capture(
    fn: None = None, **options: Unpack[Options]
) -> Callable[[Callable[..., Any]], "Graphed"]: ...


def capture(fn: Callable[..., Any] | None = None, **options: Unpack[Options]) -> Any:
    """Return ``fn`` as a ``Graphed``: each kind of call is captured once, then replayed.

    ``fn``: a function or module whose arguments and results are any pytree; ``@capture`` and
    ``@capture(...)`` work too. Where gradients flow, a forward and a backward graph are joined by
    one autograd node, as many pairs as there are forwards still to go back; a backward without
    ``retain_graph`` frees its pair, and ends its outputs at the next call; no second derivatives.
    Calls are told apart by structure, by shape, dtype, device, strides and ``requires_grad`` of
    tensors, by the value of all else, by torch's modes, a module's training flag, and
    ``key(*args, **kwargs)``. ``warmup`` (2) runs come first, and one that is timed; their writes
    and random numbers are undone, so that the first call counts once. ``first="warmup"`` lets the
    last of them be the call instead ("once"): no memory for the undoing. ``outputs="borrow"``:
    memory of the graph, and reading it after the next replay raises; "copy": fresh tensors.
    ``on_fail="eager"`` runs a call that can't be captured eagerly, and ``report()`` says why.
    Collectives of commlib stand in the graph; every member of their rings captures the same ones,
    or all of them raise. ``agree`` names a ring whose ranks compare their keys at every call, which
    blocks the host: where keys come from a rank's own data. Raises ``GraphError``.
    """
    if fn is None:
        return functools.partial(capture, **options)
    return Graphed(fn, **options)


class Graphed:
    """A captured function; call it as the function. ``reset()`` lets go of its graphs."""

    def __init__(
        self,
        fn: Callable[..., Any],
        key: Callable[..., Any] | None = None,
        warmup: int = 2,
        first: str = "once",
        outputs: str = "borrow",
        agree: int | None = None,
        on_fail: str = "raise",
    ) -> None:
        _one_of("first", first, "once", "warmup")
        _one_of("outputs", outputs, "borrow", "copy")
        _one_of("on_fail", on_fail, "raise", "eager")
        if warmup < 1:
            raise GraphError(f"warmup={warmup}: expected 1 or more runs before the capture")
        functools.update_wrapper(self, fn, updated=())
        self.fn, self._key, self._warmup, self._first = fn, key, warmup, first
        self._copy, self._agree, self._on_fail = outputs == "copy", agree, on_fail
        self.entries: dict[Any, Entry | Slots] = {}
        self.eager: dict[Any, str] = {}  # calls that stay eager, and why
        owner = getattr(fn, "__self__", fn)  # of a bound method
        self._module = owner if isinstance(owner, torch.nn.Module) else None
        self._parts = [] if self._module is None else list(self._module.modules())
        self._weights = [] if self._module is None else list(self._module.parameters())
        self._at_capture: dict[str, torch.Tensor] = {}
        everything.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the call's graph on the current stream, or capture it first."""
        if inside():
            return self.fn(*args, **kwargs)  # part of a larger capture
        call = self._arguments(args, kwargs)
        if self._agree is not None:
            self._agree_on(call.key, self._agree)
        entry = self.entries.get(call.key)
        if entry is None and call.key in self.eager:
            return self.fn(*args, **kwargs)
        try:
            if entry is not None:
                return entry.run(call, sys._getframe(1))
            return self._first_call(call, sys._getframe(1))
        except GraphError as error:
            if entry is not None and not entry.drop_lost():
                raise  # the call is wrong, not the capture
            if entry is None or not entry.parts:
                self.entries.pop(call.key, None)
            self._stay_eager(call.key, error)
        return self.fn(*args, **kwargs)

    def _stay_eager(self, key: Any, error: GraphError) -> None:
        """Have calls of this key run eagerly, unless the error is to be raised."""
        if self._on_fail == "raise" or isinstance(error, AlreadyRun):
            raise error
        self.eager[key] = str(error)
        log.once("a call of %s stays eager: %s", self.name, error)

    def _agree_on(self, key: Any, ring_id: int) -> None:
        """Compare keys with the other ranks; where one has no graph, all capture."""
        known = key in self.entries or key in self.eager
        if not same_key(CommContextManager.instance().get(ring_id), key, known) and known:
            self.eager.pop(key, None)
            entry = self.entries.pop(key, None)
            if entry is not None:
                entry.release()

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self.fn, "__qualname__", type(self.fn).__qualname__))

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        own: tuple[Any, ...] = ()
        if self._parts:
            own = (*[x.training for x in self._parts], *[x.requires_grad for x in self._weights])
        if self._key is not None:
            own = (*own, value(self._key(*args, **kwargs)))
        return arguments(args, kwargs, own) if args or kwargs else bare(own)

    # -- the first call of a kind ------------------------------------------------------------------

    def _first_call(self, call: Arguments, caller: FrameType) -> Any:
        refuse_foreign()
        device = self._device(call)
        engine = engine_for(device)
        keeps_last = self._first == "warmup"
        warm = WarmUp(self.fn, engine, device, keeps_last=keeps_last)
        result = warm.run(call, self._warmup)
        try:
            entry = self._entry(call, engine, warm, device)
        except GraphError as error:
            if not keeps_last:
                raise
            self._stay_eager(call.key, error)  # and the call has been made
            return result
        self.entries[call.key] = entry
        self._at_capture = named(self._module)
        for ring in warm.rings:
            ring.graphs.add(self)
        return result if keeps_last else entry.first(call, caller)

    def _entry(
        self, call: Arguments, engine: Engine, warm: WarmUp, device: torch.device
    ) -> Entry | Slots:
        make = functools.partial(_captured, engine, warm)
        how: dict[str, Any] = {
            "copy": self._copy,
            "own": device.type == "cpu",
            "eager_seconds": warm.eager_seconds,
        }
        if not warm.differentiable:
            return Entry(self.fn, call, make, warm.rooms(), **how)
        how |= {"make": make, "engine": engine, "parameters": warm.parameters}
        return Slots(functools.partial(Slot, self.fn, **how), call)

    def _device(self, call: Arguments) -> torch.device:
        tensors = [*call.tensors]
        if self._module is not None:
            tensors += [*self._module.parameters(), *self._module.buffers()]
        for tensor in tensors:
            if tensor.device.type == "cuda":
                return tensor.device
        if tensors or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def check(self) -> None:
        """Raise ``GraphError`` when something that the graphs use was exchanged behind them.

        That is a tensor that has other memory now (``p.data = ...``), or a parameter or buffer of a
        captured module that is another tensor than at the capture. It takes some 50 ns a tensor, so
        the program asks: behind loading weights, or once a step while looking for a bug.
        """
        now = named(self._module)
        gone = [name for name, x in self._at_capture.items() if now.get(name) is not x]
        for entry in (part for one in self.entries.values() for part in one.parts):
            names = {id(x): name for name, x in self._at_capture.items()}
            gone += [names.get(id(x), f"a {tuple(x.shape)} tensor") for x in entry.moved()]
        if gone:
            raise GraphError(
                f"{self.name}: {', '.join(gone[:5])} is not where the graph reads it any more; "
                f"write into the old memory (copy_), or type reset() to capture again"
            )

    def reset(self) -> None:
        """Let go of every graph; the next calls capture again."""
        for entry in self.entries.values():
            entry.release()
        self.entries.clear()
        self.eager.clear()


def engine_for(device: torch.device) -> Engine:
    """Return what captures on a device."""
    if device.type == "cpu":
        return HostEngine()
    return pools.engine(torch.cuda.current_device() if device.index is None else device.index)


_HINTS = {  # what the driver says, and what that means here
    "legacy stream depend on a capturing": (
        "; an autograd node that an eager forward has made on the default stream is still held: "
        "let go of that forward's outputs first, or run it on another stream"
    ),
}


def _captured(
    engine: Engine,
    warm: WarmUp,
    fn: Callable[[], Any],
    *,
    again: bool,
    part: str,
    pool: Pool | None = None,
) -> tuple[Pieces, Any]:
    """Capture ``fn``; every member of its rings succeeds, or all of them raise.

    ``again``: this rank captures ``part`` another time, the same, and no other rank is asked.
    """
    if pool is None and warm.broken:  # what runs outside may replay other graphs
        pool = engine.own_pool()
    pieces = Pieces(engine, warm.generators, pool)
    problem: Exception | None = None
    result = None
    try:
        result = pieces.make(fn)
        for ledger in pieces.ledgers:
            warm.check_state(ledger)
        if part == "forward" and not again:
            warm.check_carried(pieces.ledgers)
        warm.compare(part, pieces)
    except Exception as error:
        problem = _as_ours(error)
    try:
        rings = [] if again else warm.rings
        settle(rings, pieces.collectives, problem, counted=pieces.broken)
    except CommError:
        pieces.release()
        raise
    return pieces, result


def _as_ours(error: Exception) -> GraphError:
    """Return what is raised where a capture has failed with an error."""
    if isinstance(error, GraphError):
        return error
    text = f"{type(error).__name__}: {error}"
    why = next((hint for words, hint in _HINTS.items() if words in text), "")
    found = GraphError(f"capturing failed: {text}{why}")
    found.__cause__ = error
    return found


def _one_of(name: str, given: str, *allowed: str) -> None:
    if given not in allowed:
        raise GraphError(f"{name}={given!r}: expected {' or '.join(map(repr, allowed))}")
