"""A captured function, whose calls are replayed from graphs, one a key."""

import copy
import functools
import inspect
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from commlib.core.manager import CommContextManager
from commlib.errors import CommError, GraphError
from commlib.graph import cuda_backend as pools
from commlib.graph.backend import Backend, CpuBackend, Pool
from commlib.graph.cache_key import Arguments, arguments, bare, modes, value
from commlib.graph.captured_call import CapturedCall, Known
from commlib.graph.compare import Noise, load_kernels
from commlib.graph.grads import Grads
from commlib.graph.host import OtherValue
from commlib.graph.nested import unrolled
from commlib.graph.options import Options
from commlib.graph.rank_agreement import same_key, settle
from commlib.graph.schedule import Schedule
from commlib.graph.segments import Segments, check_foreign, inside
from commlib.graph.slots import Slot, Slots
from commlib.graph.surroundings import Surroundings
from commlib.graph.unsupported import (
    check_hidden,
    check_reads,
    check_unreadable,
    check_wanting,
    line_of,
)
from commlib.graph.verify import Unequal
from commlib.graph.warmup import WarmUp, named
from commlib.log import log
from commlib.streams import capturing

everything: "weakref.WeakSet[CapturedFunction]" = weakref.WeakSet()


_FEW, _OFTEN = 4, 8  # replays of a graph, and graphs of one kind of call


class CapturedFunction:
    """A captured function; call it as the function. ``reset()`` releases its graphs."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        if not callable(fn):
            raise GraphError(f"capture({fn!r}): expected a function or a module")
        if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
            raise GraphError(
                f"{fn.__qualname__} is an async function, whose steps no graph can hold; capture "
                f"the function that it awaits"
            )
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.options, self._schedule = fn, options, Schedule(options.verify)
        if self._schedule.ever and torch.cuda.is_initialized() and not capturing():
            load_kernels(torch.cuda.current_device())
        self.entries: dict[Any, CapturedCall | Slots] = {}
        self.eager: dict[Any, str] = {}  # calls that stay eager, and why
        self._warned = False  # of calls that are of ever new kinds
        self._seen: set[Any] = set()  # keys of calls that came once, and were not captured yet
        self._grads = Grads()
        self._lock = threading.RLock()
        self._turns = 0  # replays of any kind since the last capture: the same on all ranks
        self._replaced: Counter[Any] = Counter()  # by key: graphs whose tensors were replaced
        self._last: tuple[list[str], dict[str, str]] | None = None  # captured, and with what around
        owner = getattr(fn, "__self__", fn)  # of a bound method
        self._module = owner if isinstance(owner, torch.nn.Module) else None
        self._around = Surroundings(fn)
        self._bare = bare(())  # the last call without arguments
        self._at_capture: dict[str, weakref.ref[torch.Tensor]] = {}
        everything.add(self)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Return the method bound to ``owner``, captured for that object alone.

        A module's graphs go when the module goes, and its parameters are found through it.
        """
        if owner is None:
            return self
        bound = CapturedFunction(types.MethodType(self.fn, owner), self.options)
        try:  # found before this descriptor from now on
            object.__setattr__(owner, self.fn.__name__, bound)
        except AttributeError:
            return bound  # no place for it: each access captures again
        return bound

    def __deepcopy__(self, memo: dict[int, Any]) -> "CapturedFunction":
        """Return a captured copy of the function, which has no graph yet."""
        return type(self)(copy.deepcopy(self.fn, memo), self.options)

    def __copy__(self) -> "CapturedFunction":
        """Return the same function without its graphs."""
        return type(self)(self.fn, self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the function and the options; graphs stay in their process."""
        return type(self), (self.fn, self.options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the call's graph on the current stream, or capture it first."""
        if inside():
            return self.fn(*args, **kwargs)  # part of a larger capture
        call = self._arguments(args, kwargs)
        if self.options.agree is not None:
            self._agree_on(call.key, self.options.agree)
        entry = self.entries.get(call.key)
        if entry is not None and (entry.stale or (entry.places and self._have_moved(entry.places))):
            self._drop_stale(call.key, entry)
            entry = None
        if entry is None and call.key in self.eager:
            return self.fn(*args, **kwargs)
        if entry is None and len(self.entries) >= self.options.max_graphs:
            self._warn_of_kinds(
                call, f"calls of further kinds stay eager (max_graphs={self.options.max_graphs})"
            )
            return self.fn(*args, **kwargs)
        try:
            if entry is not None:
                # What a verified call undoes is not another thread's work. An eager part may wait
                # for a thread that calls this function too.
                with nullcontext() if entry.has_eager_parts else self._lock:
                    self._turns += 1
                    return entry.run(call, sys._getframe(1), self._turns)
            return self._first_call(call)
        except Unequal as error:
            self._drop_different(call.key, error)
            return error.result
        except OtherValue as error:
            log.once("a call of %s is made eagerly: %s", self.name, error)
        except GraphError as error:
            if entry is not None and not entry.drop_lost():
                raise  # the call is wrong, not the capture
            if entry is None or not entry.parts:
                self.entries.pop(call.key, None)
            self._stay_eager(call.key, error)
        return self.fn(*args, **kwargs)

    def _have_moved(self, places: dict[Any, Any]) -> bool:
        """Return True if a list or dict holds another tensor where the graph knows one."""
        now = self._around.places()
        return any(now.get(name) != place for name, place in places.items())

    def _drop_different(self, key: Any, error: Unequal) -> None:
        """Release a graph that differs from the function; calls of its kind are eager now."""
        entry = self.entries.pop(key, None)
        if entry is not None and self.options.on_fail == "raise":
            entry.release()  # else backwards of earlier calls may follow
        self._stay_eager(key, error)

    def _drop_stale(self, key: Any, entry: CapturedCall | Slots) -> None:
        """Release graphs whose tensors were replaced: the call is captured again.

        Where that happens at nearly every call, capturing gains nothing, and the call stays eager.
        """
        entry.release()
        del self.entries[key]
        used = sum(part.replays for part in entry.parts)
        self._replaced[key] = self._replaced[key] + 1 if used < _FEW else 1
        if self._replaced[key] > _OFTEN:
            self._stay_eager(
                key,
                GraphError(
                    f"{self.name}: a tensor that the function uses is replaced by another at "
                    f"nearly every call; write into its memory instead (copy_)"
                ),
            )

    def _warn_of_kinds(self, call: Arguments, what: str) -> None:
        """Say once that the function is called in ever new ways, and what changes."""
        if not self._warned:
            self._warned = True
            changed = "" if self._last is None else f" ({self._changed_since(*self._last, call)})"
            log.warning(
                "%s has %s graphs, and %s%s; pad what varies, or use a tensor in place of a "
                "number (lr=torch.tensor(0.1))", self.name, len(self.entries), what, changed,
            )  # fmt: skip

    def _changed_since(self, last: list[str], around: dict[str, str], call: Arguments) -> str:
        """Say in what a call differs from the one that was captured last."""
        described = call.described()
        if len(last) != len(described):
            return f"the call has {len(described)} arguments, and had {len(last)}"
        for i, (was, now) in enumerate(zip(last, described, strict=True)):
            if was != now:
                return f"argument {i} is {now}, and was {was}"
        settings = self._around.named()
        changed = [name for name in around | settings if around.get(name) != settings.get(name)]
        return f"{changed[0]} has changed" if changed else "torch's modes have changed"

    def _stay_eager(self, key: Any, error: GraphError) -> None:
        """Have calls of this key run eagerly, unless the error is to be raised."""
        if self.options.on_fail == "raise" or error.done:
            error.done = error.done or isinstance(error, Unequal)
            raise error
        self.eager[key] = str(error)
        if isinstance(error, Unequal):
            log.warning("a call of %s is eager from now on: %s", self.name, error)
        else:
            log.once("a call of %s stays eager: %s", self.name, error)

    def _agree_on(self, key: Any, ring_id: int) -> None:
        """Compare keys with the other ranks; where one has no graph, all capture."""
        known = key in self.entries or key in self.eager
        if not same_key(CommContextManager.instance().get(ring_id), key, known) and known:
            self.eager.pop(key, None)
            entry = self.entries.pop(key, None)
            if entry is not None:
                entry.release()

    def __repr__(self) -> str:
        replays = sum(part.replays for entry in self.entries.values() for part in entry.parts)
        return f"<CapturedFunction {self.name}: {len(self.entries)} graphs, {replays} replays>"

    @property
    def __commlib_captures__(self) -> Callable[..., Any]:
        """The function itself."""
        return self.fn

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self.fn, "__qualname__", type(self.fn).__qualname__))

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        own = self._around.key(args, kwargs)
        weights = self._around.weights
        if weights and torch.is_grad_enabled():
            own = (*own, *[x.requires_grad for x in weights])
        if self.options.key is not None:
            own = (*own, value(self.options.key(*args, **kwargs)))
        if args or kwargs:
            call = arguments(args, kwargs, own)
        else:
            key, call = modes() + own, self._bare
            if key != call.key:
                call = self._bare = bare(key)
        return self._grads.extend(call) if self._grads.leaves else call

    # -- the first call of a kind ------------------------------------------------------------------

    def _first_call(self, call: Arguments) -> Any:
        """Make the call eagerly, and capture what the next ones of its kind will replay."""
        check_foreign()
        check_unreadable(call.tensors)
        device = self._device(call)
        self._around.find()
        if device.type == "cpu":
            check_hidden(self._around.modules)
        engine = engine_for(device)
        counted = self.options.first == "warmup"
        weights = [*self._around.weights, *self._grads.leaves]
        how: dict[str, Any] = {"counted": counted, "weights": weights}
        how["modules"] = self._around.modules
        warm = WarmUp(self.fn, engine, device, **how)
        self._around.before_call(*call.given)
        wanted = [x.requires_grad for x in call.tensors]
        result = warm.call(call)
        self._around.after_call(*call.given)
        try:
            try:
                check_wanting(call.tensors, wanted)
                self._captured(call, engine, warm, device)
            except GraphError as error:
                if not error.reads:
                    raise
                warm.report_capture()
                self._captured(call, engine, warm, device)
                log.warning_once(
                    "%s reads values on the host unless torch.cuda.is_current_stream_capturing() "
                    "is true. Its graphs use the captured variant, whose last digits may differ",
                    self.name,
                )  # fmt: skip
        except GraphError as error:
            if self.options.on_fail == "raise":
                if counted or warm.unseen:
                    raise GraphError(
                        f"{error}; the effects of the call were kept: do not repeat it", done=True
                    ) from error
                warm.undo()
                for tensor, one in zip(call.tensors, wanted, strict=True):
                    if tensor.requires_grad != one and tensor.is_leaf:
                        tensor.requires_grad_(one)
            if wanted != [x.requires_grad for x in call.tensors]:
                self._stay_eager(call.key, error)  # the key of the next such call
            self._stay_eager(self._arguments(*call.given).key, error)
        finally:
            warm.forget()
        return result

    def _captured(
        self, call: Arguments, engine: Backend, warm: WarmUp, device: torch.device
    ) -> None:
        """Capture the call, from where it began."""
        with warm.put_back():
            # What the call has changed of its surroundings is not part of the key from now on.
            call = self._arguments(*call.given)
            self._capture(call, engine, warm, device)

    def _capture(
        self, call: Arguments, engine: Backend, warm: WarmUp, device: torch.device
    ) -> None:
        if call.key in self.entries:
            return
        if warm.begins_grads and call.key not in self._seen:
            # The first of many calls, as a rule: the later ones add to these gradients.
            self._seen.add(call.key)
            return
        least = 0 if self.options.first == "warmup" else 1
        warm.rehearse(call, max(least, self.options.warmup - 1))
        if self._grads.add(warm.owners):
            self._drop_entries()
            call = self._grads.extend(call)
        self.entries[call.key] = entry = self._entry(call, engine, warm, device)
        places = self._around.places()
        entry.places = {name: place for name, place in places.items() if entry.uses(place[0])}
        self._turns = 0
        replays = sum(part.replays for entry in self.entries.values() for part in entry.parts)
        if len(self.entries) > _OFTEN and replays < len(self.entries):
            self._warn_of_kinds(call, "hardly any was replayed")
        self._last = call.described(), self._around.named()
        self._at_capture = {name: weakref.ref(x) for name, x in named(self._module).items()}
        for ring in warm.rings:
            ring._lifecycle.graphs.add(self)

    def _entry(
        self, call: Arguments, engine: Backend, warm: WarmUp, device: torch.device
    ) -> CapturedCall | Slots:
        warm.save_again()
        make = functools.partial(_captured, engine, warm)
        known = Known(
            copy=self.options.outputs == "copy",
            own=device.type == "cpu",
            tolerance=self.options.tolerance,
            noise=Noise(),
            sets=warm.sets,
            by_parts=warm.by_parts,
            leaves=warm.leaves,
            roots=warm.roots,
            watched=warm.watched,
            unseen=warm.unseen,
        )
        if not warm.differentiable:
            return CapturedCall(self.fn, call, make, warm.rooms(), known, self._schedule)
        how: dict[str, Any] = {"make": make, "engine": engine, "parameters": warm.parameters}
        how["differs"] = functools.partial(self._drop_different, call.key)
        build = functools.partial(Slot, self.fn, known=known, **how)
        return Slots(build, call, self.fn, self._schedule)

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
        """Raise ``GraphError`` if a tensor that the graphs use was replaced since the capture.

        That is a tensor that has other memory now (``p.data = ...``), or a parameter or buffer of a
        captured module that is another tensor than at the capture. It takes some 50 ns a tensor, so
        the program asks: after loading weights, or once a step while looking for a bug.
        """
        now = named(self._module)
        gone = [name for name, x in self._at_capture.items() if now.get(name) is not x()]
        for entry in (part for one in self.entries.values() for part in one.parts):
            names = {id(x()): name for name, x in self._at_capture.items()}
            gone += [names.get(id(x), f"a {tuple(x.shape)} tensor") for x in entry.moved()]
        if gone:
            raise GraphError(
                f"{self.name}: {', '.join(gone[:5])} is not where the graph reads it any more; "
                f"write into the old memory (copy_), or call reset() to capture again"
            )

    def reset(self) -> None:
        """Release every graph; the next calls capture again."""
        self._drop_entries()
        self.eager.clear()
        self._seen.clear()
        self._at_capture = {}
        self._around, self._bare = Surroundings(self.fn), bare(())

    def _drop_entries(self) -> None:
        for entry in self.entries.values():
            entry.release()
        self.entries.clear()


def engine_for(device: torch.device) -> Backend:
    """Return what captures on a device."""
    if device.type == "cpu":
        return CpuBackend()
    return pools.engine(torch.cuda.current_device() if device.index is None else device.index)


_HINTS = {  # what the driver says, and what that means here
    "legacy stream depend on a capturing": (
        "; an autograd node that an eager forward has made on the default stream is still held: "
        "delete that forward's outputs first, or run it on another stream"
    ),
}


def _captured(
    engine: Backend,
    warm: WarmUp,
    fn: Callable[[], Any],
    *,
    again: bool,
    part: str,
    pool: Pool | None = None,
    before: Segments | None = None,
) -> tuple[Segments, Any]:
    """Capture ``fn``; every member of its rings succeeds, or all of them raise.

    ``again``: this rank captures ``part`` another time, the same, and no other rank is asked.
    ``before``: the forward of a backward.
    """
    # What runs outside may replay other graphs; gradients that are bound stay after a replay.
    if pool is None and (warm.broken or warm.binds_grads or warm.binds):
        pool = engine.own_pool()
    segments = Segments(engine, warm.generators, pool)
    problem: Exception | None = None
    result = None
    try:
        segments.leaves, segments.reports_capture = warm.leaves, warm.reports_capture
        segments.empty = warm.empty
        segments.before = {} if before is None else before.constants
        if not again:
            segments.undo = warm.capture_undo
        with unrolled(warm.modules):
            result = segments.make(fn)
        for recorder in segments.recorders:
            warm.check_state(recorder)
        if part == "forward" and not again:
            warm.check_carried(segments.recorders)
        warm.compare(part, segments)
        if segments.reads and (segments.broken or part != "forward"):
            inside = "a function with eager parts" if part == "forward" else "a backward"
            check_reads(segments.reads, inside)
        warm.reads = warm.reads or segments.reads is not None
    except Exception as error:
        if again and warm.reads:  # this call goes another way than the one that was captured
            segments.release()
            raise OtherValue(str(error)) from error
        problem = _as_ours(error)
    try:
        rings = [] if again else warm.rings
        settle(rings, segments.collectives, problem, counted=again and segments.broken)
    except CommError:
        segments.release()
        raise
    return segments, result


def _as_ours(error: Exception) -> GraphError:
    """Return what is raised where a capture has failed with an error."""
    if isinstance(error, GraphError):
        return error
    text = f"{type(error).__name__}: {error}"
    why = next((hint for words, hint in _HINTS.items() if words in text), "")
    where = line_of(error)
    found = GraphError(f"capturing failed: {text}{why}" + (f"; at {where}" if where else ""))
    found.__cause__ = error
    return found
