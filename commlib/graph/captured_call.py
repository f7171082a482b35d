"""One captured key: its graphs, the tensors they read, and how a call uses them."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_unflatten

from commlib.core.tensors import rebuilt
from commlib.errors import GraphError
from commlib.graph.bindings import Bindings, Kept, check_hidden, holds_tensor
from commlib.graph.cache_key import Arguments, of_tensor
from commlib.graph.compare import Noise, Tolerance
from commlib.graph.effects import Effects
from commlib.graph.externals import Externals
from commlib.graph.layout import copy_of, elements, is_packed
from commlib.graph.leaves import Tensors, with_grads, without_grads
from commlib.graph.outputs import Join, Outputs, flat, leads_back, standing
from commlib.graph.overlap import overlaps, span
from commlib.graph.python_state import Change, PythonState
from commlib.graph.schedule import Schedule
from commlib.graph.segments import Segments, check_foreign, making
from commlib.graph.unsupported import check_unreadable
from commlib.graph.verify import Verification, Verified
from commlib.log import log


class Known(NamedTuple):
    """What the options and the runs before the capture tell of a function.

    Attributes:
        copy: Whether outputs are copies.
        own: Whether the graph has copies of all arguments from the start.
        tolerance: Of verified calls.
        noise: What the function gives other bits of each time.
        sets: What each call binds to names.
        by_parts: Names that eager parts bind.
        leaves: Whose gradients the function may read or bind.
        roots: What leads to the objects that the function binds tensors to.
        watched: Tensors that the function can reach.
        unseen: Tensors that it writes, and no operator says so.
    """

    copy: bool
    own: bool
    tolerance: Tolerance | None
    noise: Noise
    sets: Sequence[Kept]
    by_parts: Set[tuple[int, str]]
    leaves: Sequence[torch.Tensor]
    roots: Sequence[object]
    watched: Sequence[weakref.ref[torch.Tensor]]
    unseen: Sequence[torch.Tensor]


class CapturedCall:
    """A captured call without gradients.

    The graph reads the first caller's tensors where they lie. One that comes from somewhere else
    gets memory of the graph's own, once, by capturing again; from then on it is copied there.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        call: Arguments,
        make: Callable[..., tuple[Segments, Any]],
        rooms: Sequence[torch.Tensor | None],
        known: Known,
        schedule: Schedule,
    ) -> None:
        """``rooms``: for each leaf of the result, where it is to lie if the graph makes it."""
        self._watched = known.watched
        self._unseen = _places(known.unseen, call.tensors)
        self._rooms, self._schedule, self._tolerance = rooms, schedule, known.tolerance
        self._roots, self._leaves, self._sets = known.roots, list(known.leaves), known.sets
        self._by_parts, self.noise, self._copy = known.by_parts, known.noise, known.copy
        self._fn, self._make = fn, make
        self._own: dict[int, torch.Tensor] = {}  # by position: memory of the graph's own
        self._targets: dict[int, torch.Tensor] = {}  # the same, to be written to
        self._strided: set[int] = set()  # those of them that have gaps, or elements twice
        if known.own:
            self._make_room(call, range(len(call.tensors) - call.grads))
        self.replays = self.bytes_copied = 0
        self.verified, self.verify_seconds = 0, 0.0
        self.eager_seconds: float | None = None  # host time of the function, when last verified
        self.launch_seconds: float | None = None  # that of one of the replays
        self._written: list[int] = []  # arguments that the function writes to
        self.uncaptured = False  # whether the next verified call answers "not captured", once
        self.places: dict[Any, Any] = {}  # where tensors lay that small lists and dicts hold
        self.lost = False  # it was to be captured again, and could not
        self.segments: Segments
        self._capture(call, again=False)
        if self.segments.reads and not known.own:  # a later capture may find other values
            self._make_room(call, range(len(call.tensors) - call.grads))
            self.segments.release()
            self._capture(call, again=True)
        self.uncaptured = self.segments.reports_capture

    def _capture(self, call: Arguments, *, again: bool) -> None:
        given = [self._own.get(i, tensor) for i, tensor in enumerate(call.tensors)]
        inputs = with_grads(self._inputs(given), call.tensors)
        args, kwargs = call.rebuilt(inputs)
        began, bound = time.perf_counter(), list[Change]()

        def function() -> Any:
            objects = PythonState(self._roots)
            now = making()
            assert isinstance(now, Segments)
            now.recorders[-1].note_unseen(
                given[x].detach() if isinstance(x, int) else x for x in self._unseen
            )
            with self._saving():
                result = self._fn(*args, **kwargs)
                bound.extend(self._note_bound(now, before, objects))
            self._note(given)
            self._refuse_grads(call)
            self._refuse_overlaps(call.tensors)
            return self._kept(result, inputs)

        with _reading(call, inputs), _kept_grads(self._leaves) as before:
            segments, result = self._make(function, again=again, part="forward")
        without_grads(inputs, call.tensors)
        self._together = bool(segments.collectives)  # whether all ranks replay it together
        self.segments, self._given = segments, [tensor.detach() for tensor in given]  # kept alive
        self._pointers = [tensor.data_ptr() for tensor in given]
        self._effects: dict[Any, Effects] = {}  # of a backward or a call, and of how many graphs
        places = {x.untyped_storage()._cdata for x in (*given, *call.tensors)}
        self._externals = Externals(segments.recorders, places)
        self.outputs = Outputs(result, inputs, self._is_own, copy=self._copy)
        self._bindings = Bindings(bound, self._sets, inputs, self._is_own)
        gives = self._written or self._bound or self._bindings.names or self.outputs.lends
        self._only_launches = not gives
        self._behind(result, inputs, again=again)
        self.capture_seconds = time.perf_counter() - began

    def _note(self, given: Tensors) -> None:
        """Know what the capture has done so far: what follows is not work of the function."""
        now = making()
        assert isinstance(now, Segments)
        now.own = sum(len(recorder.names) for recorder in now.recorders)
        written = {key for recorder in now.recorders for key in recorder.written}
        places = [x.untyped_storage()._cdata for x in given]
        self._written = [i for i, key in enumerate(places) if key in written]
        touched = [item for recorder in now.recorders for item in recorder.read.items()]
        changed = [item for recorder in now.recorders for item in recorder.wrote.items()]
        self._outside = [(key, at) for key, at in touched if key not in places]  # no argument's
        self._outside_written = [(key, at) for key, at in changed if key not in places]

    def _note_bound(
        self, segments: Segments, before: Sequence[torch.Tensor | None], objects: PythonState
    ) -> list[Change]:
        """Know the gradients that the function has given to leaves; returns what it has bound."""
        known = zip(self._leaves, before, strict=True)
        self._bound = [(leaf, leaf.grad) for leaf, grad in known if leaf.grad is not grad]
        changes = [x for x in objects.changes() if (x.where, x.name) not in self._by_parts]
        check_hidden(changes, segments.has_made)
        return [x for x in changes if holds_tensor(x.now)]

    def _kept(self, result: Any, inputs: Tensors) -> Any:
        """Bring what is returned to where no other graph's replay writes."""
        now = making()
        assert isinstance(now, Segments)
        leaves, spec = flat(result)
        kept: dict[int, Any] = {}  # what is returned twice is one tensor
        for i, leaf in enumerate(leaves):
            if id(leaf) not in kept:
                kept[id(leaf)] = found = standing(leaf, inputs, now.has_made)
                room = self._rooms[i] if i < len(self._rooms) and not self._copy else None
                if room is not None:  # copies are cloned after each replay
                    kept[id(leaf)] = room.copy_(found.detach())
        return tree_unflatten([kept[id(leaf)] for leaf in leaves], spec)

    def _is_own(self, tensor: torch.Tensor) -> bool:
        if any(tensor is room for room in self._rooms):
            return True
        return self.segments.has_made(tensor)

    def _inputs(self, given: Tensors) -> Tensors:
        """Return the tensors that the function is captured with."""
        return given

    def _saving(self) -> AbstractContextManager[object]:
        """Return the context that says what autograd saves while the function runs."""
        return nullcontext()

    def _behind(self, result: Any, inputs: Tensors, *, again: bool) -> None:
        """Capture what belongs to the function in addition to itself."""
        if any(map(leads_back, flat(result)[0])):
            raise GraphError(
                "an output requires grad, but the backward was not run before the capture; pass "
                "warmup=2, or call the function under torch.no_grad()"
            )

    @property
    def has_eager_parts(self) -> bool:
        """Return True if Python runs between its graphs."""
        return self.segments.broken

    @property
    def parts(self) -> list["CapturedCall"]:
        """The entry as one of a report."""
        return [] if self.lost else [self]

    @property
    def graphs(self) -> list[Segments]:
        """All that it replays."""
        return [self.segments]

    def drop_lost(self) -> bool:
        """Return True if its graphs are lost."""
        return self.lost

    def first(self, call: Arguments, caller: FrameType) -> Any:
        """Do what the capture itself has not done, and return the outputs."""
        with self.segments.lock:
            self.replays += 1
            self.segments.turn()
            self.segments.replay_rest()
            return self._outcome(call.tensors, caller)

    def run(self, call: Arguments, caller: FrameType, turn: int) -> Any:
        """Replay on the tensors of ``call`` and return the outputs; the host does not block.

        ``turn``: the number of this replay among those of all kinds, which counts where a graph has
        collectives: ranks may make the same ones in calls of other kinds.
        """
        number = turn if self._together else self.replays + 1
        if self._schedule.due(number) and self.fits_all:
            return self._verified(call, caller)
        return self._replayed(call, caller)

    @property
    def fits_all(self) -> bool:
        """Return False if a rank may have to leave out a replay, and its collectives."""
        return not (self.segments.collectives and self.segments.reads)

    def _verified(self, call: Arguments, caller: FrameType) -> Any:
        """Run the function for real and its graph after that; both must give the same."""
        self.check_call(call)
        self.order()
        args, kwargs = call.given
        verified = self.verification("output", self.segments, call).run(
            lambda: self._fn(*args, **kwargs), lambda: self._replayed(call, caller)
        )
        self.uncaptured = False
        self.note_verified(verified)
        return verified.found

    def order(self) -> None:
        """Order the current stream after the last replay, which may have written what is read."""
        with self.segments.lock:
            self.segments.turn()

    def verification(self, what: str, segments: Segments, call: Arguments | None) -> Verification:
        """Return what verifies a call of one of the graphs; a backward has no ``call``."""
        names = [name for recorder in segments.recorders for name in recorder.names]
        own = segments.own or len(names)  # copies of outputs follow
        rings = {call.ring.ring_id: call.ring for call in segments.collectives}
        return Verification(
            self.effects(call),
            segments.device,
            [rings[i] for i in sorted(rings)],
            names[:own],
            what,
            self._tolerance,
            self.noise,
            segments.reports_capture,
            self.uncaptured,
            [x for x in (reference() for reference in self._watched) if x is not None],
            [self._fn, *(() if call is None else call.given)],
            segments.join,
            self._bindings.names if call is not None else set(),
        )

    def effects(self, call: Arguments | None) -> Effects:
        """Return what the graphs, and what is copied to the arguments, change outside."""
        kind = call is None, len(self.graphs)
        places = [] if call is None else [(i, call.tensors[i]) for i in self._written]
        if any(tensor.data_ptr() != self._pointers[i] for i, tensor in places):
            return self._effects_of(call)  # of tensors that are given this once
        if kind not in self._effects:
            self._effects[kind] = self._effects_of(call)
        return self._effects[kind]

    def _effects_of(self, call: Arguments | None) -> Effects:
        recorders = [recorder for segments in self.graphs for recorder in segments.recorders]
        generators = {id(x): x for recorder in recorders for x in recorder.generators.values()}
        leaves = [owner for owner, _ in self._bound]
        return Effects(self.writes(call).values(), generators.values(), leaves)

    def note_verified(self, verified: Verified) -> None:
        """Count a verified call, what it cost, and what was learned of the function."""
        self.verified += 1
        self.verify_seconds += verified.seconds
        self.eager_seconds = verified.eager_seconds
        if self.noise:
            log.once(
                "%s gives other bits each time it is run: numbers are compared by half of their "
                "digits; set tolerance=(rtol, atol) for another measure",
                getattr(self._fn, "__qualname__", type(self._fn).__qualname__),
            )

    def check_call(self, call: Arguments) -> None:
        """Raise ``GraphError`` for arguments that the graph can't take, before anything runs."""
        pointers = [tensor.data_ptr() for tensor in call.tensors]
        if pointers != self._pointers:
            self._refuse_arguments(call, pointers)

    def _refuse_arguments(self, call: Arguments, pointers: Sequence[int]) -> None:
        if 0 in pointers:
            check_unreadable(call.tensors)
        self._refuse_overlaps(call.tensors, pointers)

    def writes(self, call: Arguments | None) -> dict[int, torch.Tensor]:
        """Return the memory of the program that is written, as a tensor each."""
        own = {
            x.untyped_storage()._cdata for x in (*self._own.values(), *self._rooms) if x is not None
        }
        recorders = [recorder for segments in self.graphs for recorder in segments.recorders]
        found = {key: recorder.externals[key] for recorder in recorders for key in recorder.written}
        given = [] if call is None else [call.tensors[i].detach() for i in self._written]
        found |= {x.untyped_storage()._cdata: x for x in given}
        return {
            key: each
            for key, each in found.items()
            if key not in own and not any(segments.made(key) for segments in self.graphs)
        }

    def _replayed(self, call: Arguments, caller: FrameType) -> Any:
        tensors = call.tensors
        pointers = [tensor.data_ptr() for tensor in tensors]
        with self.segments.lock:
            self.segments.turn()
            self.bytes_copied = 0
            if pointers != self._pointers and self._place(call, pointers, caller):
                return self.first(call, caller)
            if self.outputs.lends:
                self.outputs.expire(f"the call at {place(caller)}")
            self.replays += 1
            timed = not self.replays & (self.replays - 1)  # now and then: the clock takes its time
            began = time.perf_counter() if timed else 0.0
            if self.segments.broken:
                self._replay_parts(call)
            else:
                self.segments.replay()
            if timed:
                self.launch_seconds = time.perf_counter() - began
            return self._outcome(tensors, caller)

    def _replay_parts(self, call: Arguments) -> None:
        """Replay graphs and eager parts; these find the gradients that the graphs have."""
        given = [self._own.get(i, tensor) for i, tensor in enumerate(call.tensors)]
        before = self._bindings.now()
        with _kept_grads(self._leaves), _reading(call, given):
            self.segments.replay()
        self._bindings.check(before)

    def _outcome(self, tensors: Sequence[torch.Tensor], caller: FrameType) -> Any:
        if self._only_launches:
            return self.outputs.give(tensors, "")
        for i in self._written:
            if i in self._own:
                with torch.no_grad():
                    tensors[i].copy_(self._own[i])
        for owner, grad in self._bound:
            if owner.grad is not grad or self._copy:
                owner.grad = grad.clone() if self._copy and grad is not None else grad
        self._bindings.bind(tensors)
        where = place(caller) if self.outputs.lends else ""
        return self.outputs.give(tensors, where, self._join(tensors))

    def _join(self, tensors: Sequence[torch.Tensor]) -> Join | None:
        """Return what ties outputs to the gradients of the caller's tensors."""
        return None

    def _place(self, call: Arguments, pointers: Sequence[int], caller: FrameType) -> bool:
        """Copy what is elsewhere to where the graph reads it; says whether it captured again.

        What is copied may be an output of the last replay, so that one expires after this.
        """
        self._refuse_arguments(call, pointers)
        moved = [i for i, at in enumerate(pointers) if at != self._pointers[i]]
        fresh = [i for i in moved if i not in self._own]
        known = [i for i in moved if i in self._own]
        if known:
            with torch.no_grad():
                torch._foreach_copy_(
                    [self._targets[i] for i in known],
                    [self._elements(i, call.tensors[i]) for i in known],
                )
        self.bytes_copied = sum(call.tensors[i].nbytes for i in moved)
        if fresh:
            check_foreign()
            self._make_room(call, fresh)
            self.outputs.expire(f"the call at {place(caller)}")
            self.lost = True
            self.segments.release()
            self._capture(call, again=True)
            self.lost = False
        return bool(fresh)

    def _refuse_grads(self, call: Arguments) -> None:
        """Refuse a function that reads ``grad`` of an argument: the next one's is elsewhere."""
        for i, tensor in enumerate(call.tensors[: len(call.tensors) - call.grads]):
            grad = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
            key = None if grad is None else grad.untyped_storage()._cdata
            if key is not None and any(key == known for known, _ in self._outside):
                raise GraphError(
                    f"the function reads .grad of argument tensor {i}; a replay could not read the "
                    f"gradient of the next call's tensor. Pass the gradient as an argument"
                )

    def _refuse_overlaps(self, tensors: Tensors, pointers: Sequence[int] = ()) -> None:
        """Refuse memory that is shared outside, and not in the graph, where one side is written.

        ``pointers``: where a call's arguments lie; those that moved get memory of the graph's own.
        """
        own: dict[int, object] = {i: id(room) for i, room in self._own.items()}
        for i, at in enumerate(pointers):
            if at != self._pointers[i]:
                own.setdefault(i, (at, of_tensor(tensors[i])))
        for i in own if self._outside else ():
            key, (begin, end) = tensors[i].untyped_storage()._cdata, span(tensors[i])
            touched = [*self._outside_written, *(self._outside if i in self._written else ())]
            if any(k == key and low < end and begin < high for k, (low, high) in touched):
                raise GraphError(
                    f"argument tensor {i} shares memory with a tensor that the function uses "
                    f"without receiving it, and one of them is written; pass the other tensor too, "
                    f"or pass a copy"
                )
        if not self._written:
            return
        written = set(self._written)
        for i, j in overlaps(tensors):
            if own.get(i) != own.get(j) and (i in written or j in written):
                raise GraphError(
                    f"tensors {i} and {j} of the arguments overlap, and the function writes one; "
                    f"give it one of them, and slice inside"
                )

    def moved(self) -> list[torch.Tensor]:
        """Return the tensors from outside that do not lie any more where the graph reads them."""
        return self._externals.moved()

    @property
    def stale(self) -> bool:
        """Return True if the program has released a tensor that the graph reads."""
        return self._externals.gone or self._bindings.gone

    def uses(self, key: int) -> bool:
        """Return True if the graphs read or write the memory that ``key`` names, or bind it."""
        known = (recorder.externals for segments in self.graphs for recorder in segments.recorders)
        return any(key in each for each in known) or key in self._bindings.memory()

    def _make_room(self, call: Arguments, positions: Iterable[int]) -> None:
        """Give the graph its own copies of some arguments; the same ones share one."""
        shared: dict[Any, torch.Tensor] = {}
        for i in positions:
            tensor = call.tensors[i]
            layout = tensor.data_ptr(), *of_tensor(tensor)
            self._own[i] = shared.setdefault(layout, copy_of(tensor))
            if not is_packed(tensor):
                self._strided.add(i)
            # What a replay puts there is not a change of what a backward has saved of the last.
            self._targets[i] = self._elements(i, self._own[i].data)

    def _elements(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        return elements(tensor) if i in self._strided else tensor

    def release(self) -> None:
        """Release the graphs and all that they read; what was returned can't be read any more.

        Torch swaps the content of no tensor that a weak reference points to.
        """
        self.outputs.expire("the release of the graph")
        self.segments.release()
        self._externals.forget()
        self._watched = ()


def _places(
    found: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]
) -> list[torch.Tensor | int]:
    """Return tensors, or in place of an argument's memory its position."""
    positions = {x.untyped_storage()._cdata: i for i, x in enumerate(arguments)}
    return [positions.get(x.untyped_storage()._cdata, x) for x in found]


@contextmanager
def _kept_grads(leaves: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor | None]]:
    """Restore the gradients of leaves after a ``with`` block; yields those from before it."""
    before = [leaf.grad for leaf in leaves]
    try:
        yield before
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


@contextmanager
def _reading(call: Arguments, inputs: Tensors) -> Iterator[None]:
    """Let owners have their gradients where the graph reads them, inside a ``with`` block."""
    owners, given = call.owners, iter(inputs[len(inputs) - call.grads :])
    before = [owner.grad for owner in owners]
    for owner, grad in zip(owners, before, strict=True):
        owner.grad = None if grad is None else rebuilt(grad, lambda _: next(given))
    try:
        yield
    finally:
        for owner, kept in zip(owners, before, strict=True):
            owner.grad = kept


def place(caller: FrameType) -> str:
    """Return file and line of the caller of a captured function."""
    return f"{caller.f_code.co_filename}:{caller.f_lineno}"
