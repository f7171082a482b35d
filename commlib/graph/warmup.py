"""The runs of a function before its capture: what they show, and how they are undone."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from commlib.core import observers
from commlib.core.tensors import has_memory, parts
from commlib.errors import CommError, GraphError
from commlib.graph.backend import Backend
from commlib.graph.bindings import Kept, holds_tensor, kept
from commlib.graph.cache_key import Arguments
from commlib.graph.capture_query import reporting
from commlib.graph.digest import digests, whole
from commlib.graph.generators import default_generator, moved_on
from commlib.graph.leaves import leaf, parameters, plain_gradients, with_grads, without_grads
from commlib.graph.nested import unrolled
from commlib.graph.outputs import awaited, flat, leads_back
from commlib.graph.python_state import Change, PythonState, random_state
from commlib.graph.rank_agreement import settle
from commlib.graph.reach import reached
from commlib.graph.real_call import RealCall
from commlib.graph.recorder import Recorder
from commlib.graph.schema import memory
from commlib.graph.segments import Segments, Warming, apart
from commlib.graph.undo import UndoLog
from commlib.graph.unsupported import check_python_random, check_unseen


def named(module: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module by name."""
    if module is None:
        return {}
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class WarmUp:
    """The first call of a kind, and the runs between it and its capture.

    The first run is the call itself: its result and all that it does count. The runs after it show
    what a graph of the function would have to do, and are put back: memory, gradients, generators,
    and the Python objects that the function can reach.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        engine: Backend,
        device: torch.device,
        *,
        counted: bool,
        weights: Sequence[torch.Tensor],
        modules: Sequence[torch.nn.Module],
    ) -> None:
        """Know how the call is made.

        Args:
            fn: The function.
            engine: What captures it.
            device: Where it runs.
            counted: The call counts even where no capture follows, so that nothing is copied.
            weights: Leaves that the function can reach.
            modules: Modules that it can reach.
        """
        self.modules = weakref.WeakSet(modules)
        self.weights = [x for x in weights if x.is_leaf and x.requires_grad]
        self._fn, self._engine, self._device, self._counted = fn, engine, device, counted
        self.generators: list[torch.Generator] = []
        self.rings: list[Any] = []
        self.differentiable = False
        self.parameters: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor | None] = []
        self._texts: dict[str, list[str]] = {}  # by part: its collectives in words
        self.broken = False  # whether parts lie outside
        self._compared = False  # whether the capture has to be as the run before it
        self._names: list[str] = []  # operators of the function itself, and its collectives
        self._calls: list[str] = []
        self._made: dict[int, StorageWeakRef] = {}  # memory that the runs after the call made
        self._carried: set[int] = set()  # of these, what the last run has read
        self.empty: set[int] = set()  # memory that each run fills itself, and leaves without a byte
        self._drawn: list[torch.Generator] = []  # that the run before has drawn from
        self._roots: list[object] = []
        self.binds_grads = False
        self.watched: list[weakref.ref[torch.Tensor]] = []  # that the function can reach
        self.reads = False  # whether the graph fits only certain values that the host reads
        self.unseen: list[torch.Tensor] = []  # that the call has written, and no operator said so
        self.sets: list[Kept] = []  # what the call has bound to names, and later runs leave
        self.by_parts: set[tuple[int, str]] = set()  # names that eager parts bind
        self.reports_capture = False  # the answer when the function asks whether it is captured
        self._rebinds = False  # whether names are bound to other objects at each run
        self.binds = False  # whether it binds tensors to names outside
        self.leaves: list[torch.Tensor] = []  # that the function can reach or has read
        self.owners: list[torch.Tensor] = []  # of these, whose gradients it uses
        self._recorder = Recorder(device)
        self._real = RealCall(device, (), copies=not counted)
        self._before = self._after = PythonState(())

    def call(self, call: Arguments) -> Any:
        """Make the call; every member of its rings comes through, or all of them raise."""
        args, kwargs = call.given
        self._roots = [self._fn, args, kwargs]
        result, problem, run = None, None, Warming(self._real.undo, self._roots)
        self._before = PythonState(self._roots)
        self._real.note_leaves(self.weights)
        held = _memory_of(self._before.tensors or reached(self._roots).tensors)
        bits = digests(held)
        with self._engine.calling(), run.under_way():
            try:
                result = self._real.run(lambda: self._fn(*args, **kwargs))
            except Exception as error:
                problem = error
            self.rings = [ring for _, ring in sorted(self._real.rings.items())]
            self._engine.join(self.rings)
        self.broken = run.broken
        self._drawn = [generator for generator, _ in self._real.undo.generators]
        self._begun = self._real.begun_grads()
        try:
            settle(self.rings, (), problem, counted=self._counted)
        except CommError:
            self.undo()
            raise
        pairs = zip(held, bits, digests(held), strict=True)
        changed = [whole(x) for x, before, after in pairs if before != after and x.nbytes()]
        known = self._real.written  # that of eager parts is in the log
        self.unseen = [
            x
            for x in changed
            if memory(x) not in known and not self._real.undo.has_noted(memory(x))
        ]
        self._after = PythonState(self._roots)
        self.by_parts = set(run.changed)
        changes = [x for x in self._before.changes() if x.has_place and self._is_kept(x)]
        self.sets = [kept(x, call.tensors) for x in changes]
        self.watched = [weakref.ref(x) for x in self._after.tensors]
        return result

    @property
    def begins_grads(self) -> bool:
        """Return True if the call has given a gradient to a leaf that had none."""
        return bool(self._begun)

    @property
    def roots(self) -> list[object]:
        """Return what leads to the objects that the function binds tensors to, if it does."""
        return self._roots if self._rebinds else []

    def _is_kept(self, change: Change) -> bool:
        """Return True for a plain value, and for a tensor that the call has not made."""
        if isinstance(change.now, torch.Tensor):
            return memory(change.now) not in self._real.made
        return change.is_plain

    def save_again(self) -> None:
        """Know what the capture may write, where it runs for real: around eager parts."""
        if self.broken:
            self._recorder.save_again()
            for leaf in self.leaves:
                self._recorder.undo.note_leaf(leaf)

    @property
    def capture_undo(self) -> UndoLog:
        """The log of what eager parts change in the capture."""
        return self._recorder.undo

    def undo(self) -> None:
        """Put back what the call has done, unless it counts."""
        if not self._counted:
            self._real.undo.restore()
            self._before.restore()

    def report_capture(self) -> None:
        """Begin again, and answer that the function is captured: it reads values otherwise."""
        self.reports_capture = True
        self._made, self._carried, self._texts = {}, set(), {}

    def forget(self) -> None:
        """Release what only the first call needs."""
        self._real = RealCall(self._device, ())
        self._before = self._after = PythonState(())
        self._begun, self._roots, self.sets = [], [], []

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Begin where the call began inside a ``with`` block, and leave all as after the call.

        A call may have used up what there was: it has filled a cache to its end.
        """
        noted = [(owner, grad, owner.grad) for owner, grad in self._real.undo.grads]
        grads = [(owner, now) for owner, before, now in noted if before is not now]
        for owner, before, _ in noted:
            owner.grad = before
        self._real.undo.swap()
        try:
            yield
        finally:
            self._recorder.restore()  # what a capture around eager parts has done
            self._real.undo.swap()
            self._recorder = Recorder(self._device)
            for owner, grad in grads:
                owner.grad = grad
            self._after.restore()

    def rehearse(self, call: Arguments, times: int) -> None:
        """Run the function ``times`` more, watched."""
        self._check_history(self._real.undo.tied)
        check_unseen(self.unseen)
        self._compared = times > 0
        for turn in range(times):
            drawn, self._recorder = self._drawn, self._watching(self._drawn)
            objects = PythonState(self._roots) if turn else self._after
            self._once(call, drawn, objects, as_before=0 < turn == times - 1)
            own = default_generator(self._device)
            self._drawn = [own, *(x for x in self._recorder.generators.values() if x is not own)]

    def _watching(self, drawn: Sequence[torch.Generator]) -> Recorder:
        """Return what watches a run that draws from ``drawn``."""
        recorder = Recorder(self._device, drawn=drawn)
        recorder.empty = self.empty
        return recorder

    def _note_emptied(self, recorder: Recorder) -> None:
        """Know memory that each run fills and empties, and refuse it where a backward follows."""
        self.empty = self.empty | recorder.emptied
        if self.empty and self.differentiable:
            raise GraphError(
                "the function empties memory that it uses (resize_), as FSDP does, and its "
                "backward fills it again; capture the whole step, with its backward"
            )

    def _once(
        self,
        call: Arguments,
        drawn: Sequence[torch.Generator],
        objects: PythonState,
        *,
        as_before: bool = False,
    ) -> None:
        """Run once; every member of the rings comes through, or all of them raise.

        ``objects`` hold what they held before.
        """
        problem: Exception | None = None
        recorder = self._recorder
        run = Warming(recorder.undo, self._roots)
        with (
            self._engine.warming(),
            moved_on(drawn),
            reporting(self.reports_capture),
            unrolled(self.modules),
            run.under_way(),
            observers.unwaited() as works,
        ):
            try:
                for weight in self.weights:
                    recorder.undo.note_leaf(weight)
                before = self._names
                self._run(call, recorder)
                self._note_changes(call, objects, run)
                if as_before:
                    same("two runs of the function differ", before, self._names)
            except CommError as error:
                problem = error
            except Exception as error:
                problem = GraphError(
                    f"the function runs once, and not again: {type(error).__name__}: {error}"
                )
                problem.__cause__ = error
            for work in works:  # one that nobody waits for would write after the undoing
                try:
                    work.wait()
                except Exception as error:
                    problem = problem or error
            self._engine.join(recorder.rings)
            try:
                recorder.restore()
            except Exception as error:  # the other ranks wait for the outcome
                problem = problem or error
        self.rings = recorder.rings
        self.generators = [
            generator
            for generator in recorder.generators.values()
            if generator.device.type == "cuda"
            and generator is not default_generator(generator.device)
        ]
        self.broken = self.broken or run.broken
        settle(self.rings, recorder.collectives, problem, counted=False)

    def _run(self, call: Arguments, recorder: Recorder) -> None:
        """Run the function and its backward."""
        grad = torch.is_grad_enabled()
        inputs = with_grads([leaf(x) if grad else x for x in call.tensors], call.tensors)
        args, kwargs = call.rebuilt(inputs)
        recorder.note_unseen(self.unseen)
        with recorder, apart():
            drawn = random_state()
            result = self._fn(*args, **kwargs)
            if random_state() != drawn:
                check_python_random()
            if not call.still(inputs, args, kwargs):
                raise GraphError(
                    "the function changes a list or dict that it is given, and no replay would; "
                    "return what is new"
                )
            self._names, self._calls = list(recorder.names), list(map(str, recorder.collectives))
            result = awaited(result)
            self._go_back(result, inputs, recorder)
        without_grads(inputs, call.tensors)
        self._note_emptied(recorder)
        self._check_history(recorder.undo.tied)
        self._note_grads((*call.tensors, *inputs), recorder)
        self.check_state(recorder)
        self._note_outputs(result, recorder)
        self._carried = {
            key for key in recorder.externals if self._lives(key) or key in self._real.made
        } - self.empty
        self._made.update(recorder.made)

    def _go_back(self, result: Any, inputs: Sequence[torch.Tensor], recorder: Recorder) -> None:
        """Run the backward too, where there is one."""
        outs = [x for x in flat(result)[0] if leads_back(x)]
        self.differentiable = bool(outs)
        if not outs:
            return
        computed, self.parameters = recorder.computed, parameters(recorder, inputs)
        wanted = [x for x in (*inputs, *self.parameters) if x.requires_grad]
        ones = [torch.ones_like(x) for x in outs]
        if not wanted and not computed:
            raise GraphError("an output wants a gradient, and no tensor before it does")
        found = plain_gradients(outs, (*wanted, *computed), ones)
        for tensor, grad in zip(computed, found[len(wanted) :], strict=True):
            if grad is not None:
                raise GraphError(
                    f"a {tuple(tensor.shape)} tensor that the function reads, but is not given, "
                    f"wants a gradient: pass it as an argument, or detach it"
                )

    def _note_grads(self, given: Sequence[torch.Tensor], recorder: Recorder) -> None:
        """Know which leaves' gradients the function reads, writes or binds, but for arguments."""
        arguments = {id(tensor) for tensor in given}
        bound = [(leaf, grad) for leaf, grad in recorder.undo.grads if leaf.grad is not grad]
        self.binds_grads = bool(bound)
        self.leaves = [leaf for leaf, _ in recorder.undo.grads if id(leaf) not in arguments]
        # What is dropped before it is read may be there before a call or not.
        used = {id(leaf) for leaf, grad in bound if grad is None}
        used |= {
            id(leaf)
            for leaf, grad in recorder.undo.grads
            if grad is not None and any(memory(x) in recorder.externals for x in parts(grad))
        }
        self.owners = [leaf for leaf in self.leaves if id(leaf) in used]

    def _note_changes(self, call: Arguments, objects: PythonState, run: Warming) -> None:
        """Refuse Python state that each run changes; tensors are bound again at each replay."""
        changes = [x for x in objects.changes() if (x.where, x.name) not in run.changed]
        self.by_parts |= run.changed.keys()
        other = {(x.where, x.name) for x in changes if not x.is_plain} | self.by_parts
        self.sets = [x for x in self.sets if (x.where, x.name) not in other]
        there = {id(x) for x in objects.tensors} - {id(x) for x in call.tensors}
        for change in (x for x in objects.changes() if x.has_place):
            if change.now is not run.changed.get((change.where, change.name), change.now):
                raise GraphError(
                    f"the function and an eager part of it both bind {change.name}, and a replay "
                    f"would not know which comes last; bind it in one of them"
                )
        for change in changes:
            if id(change.now) in there:
                raise GraphError(
                    f"the function binds {change.name} to another of its tensors at each run, and "
                    f"each replay would bind the same; copy_() what they hold"
                )
            if change.counts:
                raise GraphError(
                    f"the function changes {change.name} at each run ({change.before!r:.40}, then "
                    f"{change.now!r:.40}), and no replay would; do that outside, or in a part that "
                    f"is marked with commlib.graph.eager"
                )
        self.binds = any(holds_tensor(change.now) for change in changes)
        self._rebinds = not all(change.is_plain for change in changes)

    def _check_history(self, tied: Sequence[torch.Tensor]) -> None:
        """Refuse to write outside what would be a part of the caller's autograd graph."""
        if tied:
            raise GraphError(
                f"a {tuple(tied[0].shape)} tensor that the function is given, or uses, is written "
                f"with something that wants a gradient; write x.detach() into it, or return it"
            )

    def check_state(self, recorder: Recorder) -> None:
        """Refuse state that a run after the call has made and the next one has written."""
        written = [memory for key, memory in recorder.written.items() if self._lives(key)]
        if written:
            sizes = ", ".join(f"{memory.nbytes()} bytes" for memory in written[:5])
            raise GraphError(
                f"{len(written)} tensors ({sizes}) that the function makes in its second run and "
                f"writes in the next would count a run too many; call the function eagerly until "
                f"its state is made, and capture it then"
            )

    def check_carried(self, recorders: Sequence[Recorder]) -> None:
        """Refuse state that each run makes again from the last one's: its name is rebound.

        What one run makes for all others, such as a table, the capture reads too.
        """
        lost = [
            key for key in self._carried if not any(key in each.externals for each in recorders)
        ]
        if lost:
            raise GraphError(
                f"{len(lost)} tensors that the function makes in one run and reads in the next "
                f"(state = state + ...) would be those of the capture at every replay; write into "
                f"their memory instead (state.add_(...))"
            )

    def _lives(self, key: int) -> bool:
        """Whether memory is still there that an earlier run has made."""
        return key in self._made and not self._made[key].expired()

    def _note_outputs(self, result: Any, recorder: Recorder) -> None:
        """Know what the result is made of, and which of it the function has made."""
        self._outputs = [
            torch.empty_like(x, device="meta")
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata in recorder.made
            else None
            for x in flat(result)[0]
        ]

    def rooms(self) -> list[torch.Tensor | None]:
        """Return memory outside the pool for each leaf of the result that the function makes."""
        return [
            None if x is None else torch.empty_strided(
                x.shape, x.stride(), dtype=x.dtype, device=self._device
            )
            for x in self._outputs
        ]  # fmt: skip

    def compare(self, part: str, segments: Segments) -> None:
        """Refuse a capture that has done something else than the run before it, or than the last.

        Such as a function that asks whether it is being captured.
        """
        texts = list(map(str, segments.collectives))
        if part == "forward" and self._compared:
            names = [name for recorder in segments.recorders for name in recorder.names]
            what = "the run before the capture and the capture differ"
            same(what, self._names, names[: segments.own])
            same(what, self._calls, texts)
        same("two captures of the function differ", self._texts.setdefault(part, texts), texts)


def _memory_of(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return each piece of memory that tensors lie in."""
    held = (part for x in tensors for part in parts(x))
    plain = [x for x in held if has_memory(x) and x.numel()]
    return [*{memory(x): x.untyped_storage() for x in plain}.values()]


def same(what: str, before: list[str], after: list[str]) -> None:
    """Raise ``GraphError`` naming the first of the calls in which two lists differ."""
    if before == after:
        return
    shortest = min(len(before), len(after))
    first = next((i for i in range(shortest) if before[i] != after[i]), shortest)
    was, now = (names[first] if first < len(names) else "nothing" for names in (before, after))
    raise GraphError(
        f"{what}: call number {first} was {was}, then {now}; a graph would repeat one of them. "
        f"More warmup= runs may settle it"
    )
