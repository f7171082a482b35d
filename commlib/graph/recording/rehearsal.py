"""The runs of a function between its first call and its capture: observed, and undone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commlib.core import observers
from commlib.core.tensors import parts
from commlib.core.work import Work
from commlib.errors import CommError, GraphError
from commlib.graph.backends.base import Backend
from commlib.graph.calls.bindings import check_gradients, holds_tensor
from commlib.graph.calls.cache_key import Arguments
from commlib.graph.calls.leaves import (
    check_backwards,
    leaf,
    parameters,
    plain_gradients,
    with_grads,
    without_grads,
)
from commlib.graph.calls.output_guard import LENT
from commlib.graph.calls.outputs import awaited, flat, leads_back
from commlib.graph.operators.generators import advanced, default_generator
from commlib.graph.operators.layout import empty_repeated
from commlib.graph.operators.nested import unrolled
from commlib.graph.operators.schema import memory
from commlib.graph.operators.unsupported import check_python_random, check_tied
from commlib.graph.python.changes import Change
from commlib.graph.python.python_state import PythonState, random_state
from commlib.graph.recording.capture_run import isolated
from commlib.graph.recording.counted_call import CountedCall
from commlib.graph.recording.findings import check_same
from commlib.graph.recording.rank_agreement import raise_together
from commlib.graph.watching.capture_query import reporting
from commlib.graph.watching.recorder import Recorder
from commlib.graph.watching.runs import WarmUpRun
from commlib.graph.watching.touched_memory import TouchedMemory


def rehearse(
    fn: Callable[..., Any], backend: Backend, first: CountedCall, call: Arguments, times: int
) -> None:
    """Run ``fn`` another ``times`` times and record what a graph must reproduce.

    Memory, gradients, generators and the Python objects that it can reach are restored.

    Raises:
        GraphError: The function can't be captured; every member of its rings raises.
    """
    first.findings.compared = times > 0
    rehearsal = _Rehearsal(fn, backend, first, call)
    for turn in range(times):
        objects = PythonState(first.roots) if turn else first.after
        rehearsal.run(objects, as_before=0 < turn == times - 1)
    rehearsal.note_capture()


class _Rehearsal:
    """The runs, in order: each begins with the Python state that the one before has left."""

    def __init__(
        self, fn: Callable[..., Any], backend: Backend, first: CountedCall, call: Arguments
    ) -> None:
        self._fn, self._backend, self._first, self._call = fn, backend, first, call
        self._findings = first.findings
        self._drawn = first.drawn  # generators that the run before has drawn from
        self._recorder: Recorder | None = None  # of the last run

    def run(self, objects: PythonState, *, as_before: bool) -> None:
        """Run once. Either all ranks of the rings succeed, or all raise.

        Args:
            objects: What Python objects hold before the run.
            as_before: Whether the run has to do the same as the one before it.
        """
        findings = self._findings
        self._recorder = recorder = Recorder(self._backend.device, drawn=self._drawn)
        recorder.memory.empty = findings.empty
        run = WarmUpRun(recorder.undo, self._first.roots)
        problem: Exception | None = None
        with (
            self._backend.warming(),
            advanced(self._drawn),
            reporting(findings.reports_capture),
            unrolled(findings.modules),
            run.under_way(),
            observers.unwaited() as works,
        ):
            try:
                for weight in self._first.weights:
                    recorder.undo.note_leaf(weight)
                before = findings.names
                changes = self._watch(recorder, run, objects)
                self._note_changes(run, objects, recorder.memory, changes)
                if as_before:
                    check_same("two runs of the function differ", before, findings.names)
            except CommError as error:
                problem = error
            except Exception as error:
                problem = GraphError(
                    f"the second run of the function failed: {type(error).__name__}: {error}"
                )
                problem.__cause__ = error
            findings.rings = recorder.rings
            problem = self._undone(recorder, works, problem)
        findings.broken = findings.broken or run.broken
        self._note_generators(recorder)
        raise_together(findings.rings, recorder.collectives, problem, counted=False)

    def _undone(
        self, recorder: Recorder, works: Sequence[Work], problem: Exception | None
    ) -> Exception | None:
        """Undo a run that has ended; returns ``problem``, or the first error here."""
        for work in works:  # one that the function did not wait for would write after the undo
            try:
                work.wait()
            except Exception as error:
                problem = problem or error
        self._backend.join(self._findings.rings)
        try:
            recorder.restore()
        except Exception as error:  # the other ranks wait for the outcome
            problem = problem or error
        return problem

    def note_capture(self) -> None:
        """Record what the capture may write, where it runs for real: around eager parts."""
        if self._findings.broken and self._recorder is not None:
            self._recorder.note_again(self._findings.undo)
            for each in self._findings.leaves:
                self._findings.undo.note_leaf(each)

    def _note_generators(self, recorder: Recorder) -> None:
        default = default_generator(self._backend.device)
        others = [x for x in recorder.random.generators.values() if x is not default]
        self._drawn = [default, *others]
        self._findings.generators = [
            x
            for x in recorder.random.generators.values()
            if x.device.type == "cuda" and x is not default_generator(x.device)
        ]

    # -- one run -----------------------------------------------------------------------------------

    def _watch(self, recorder: Recorder, run: WarmUpRun, objects: PythonState) -> list[Change]:
        """Run the function and its backward; returns what it changes of ``objects``."""
        findings, call, grad = self._findings, self._call, torch.is_grad_enabled()
        inputs = with_grads([leaf(x) if grad else x for x in call.tensors], call.tensors)
        args, kwargs = call.rebuilt(inputs)
        if findings.unseen:
            recorder.note_unseen(findings.unseen)
        with recorder, isolated():
            drawn = random_state()
            result = self._fn(*args, **kwargs)
            if random_state() != drawn:
                check_python_random()
            if not call.still(inputs, args, kwargs):
                raise GraphError(
                    "the function changes a list or dict that it is given, but a replay would not; "
                    "return the new contents instead"
                )
            findings.names, findings.calls = (
                list(recorder.names),
                list(map(str, recorder.collectives)),
            )
            if any(x.requires_grad for x in inputs):
                check_backwards(inputs, call.tensors, self._first.histories)
            leaves = flat(awaited(result))[0]
            self._go_back(leaves, inputs, recorder)
        without_grads(inputs, call.tensors)
        self._note_emptied(recorder)
        check_tied(recorder.undo.tied)
        self._note_grads((*call.tensors, *inputs), recorder)
        findings.check_state(recorder)
        self._note_memory(leaves, recorder)
        changes = list(objects.changes())
        others = [x for x in changes if (x.where, x.name) not in run.changed]
        if others or any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
            check_gradients(leaves, others, inputs, recorder)
        return changes

    def _go_back(
        self, leaves: Sequence[Any], inputs: Sequence[torch.Tensor], recorder: Recorder
    ) -> None:
        """Run the backward too, where there is one; ``leaves``: those of the result."""
        outs = [x for x in leaves if leads_back(x) and all(x is not y for y in inputs)]
        findings = self._findings
        findings.differentiable = bool(outs)
        if not outs:
            return
        computed = list(recorder.computed.values())
        findings.parameters = parameters(recorder, inputs)
        wanted = [x for x in (*inputs, *findings.parameters) if x.requires_grad]
        ones = [torch.ones_like(x) for x in outs]
        if not wanted and not computed:
            raise GraphError(
                "an output requires grad but none of its inputs does; detach the output or pass "
                "the parameter as an argument"
            )
        try:
            quiet = (*findings.parameters, *computed)
            grads = plain_gradients(outs, (*wanted, *computed), ones, quiet=quiet)
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise GraphError(
                "an output leads back through a backward that the function itself has run; return "
                "it detached: `return loss.detach()`"
            ) from error
        for tensor, grad in zip(computed, grads[len(wanted) :], strict=True):
            if grad is not None:
                raise GraphError(
                    f"the function reads a {tuple(tensor.shape)} tensor that requires grad but "
                    f"is not an argument; pass it as an argument or detach it"
                )

    def _note_emptied(self, recorder: Recorder) -> None:
        """Record memory that each run fills and empties; raise if a backward follows."""
        findings = self._findings
        findings.empty = findings.empty | recorder.memory.emptied
        if findings.empty and findings.differentiable:
            raise GraphError(
                "the function empties memory that it uses (resize_), as FSDP does, and its "
                "backward fills it again; capture the whole step, with its backward"
            )

    def _note_grads(self, given: Sequence[torch.Tensor], recorder: Recorder) -> None:
        """Record which leaves' gradients the function reads, writes or binds, but for arguments."""
        findings, noted = self._findings, list(recorder.undo.grads)
        arguments = {id(tensor) for tensor in given}
        bound = [(leaf, grad) for leaf, grad in noted if leaf.grad is not grad]
        findings.binds_grads = bool(bound)
        findings.leaves = [leaf for leaf, _ in noted if id(leaf) not in arguments]
        # What is dropped before it is read may be there before a call or not.
        used = {id(leaf) for leaf, grad in bound if grad is None}
        externals = recorder.memory.externals
        used |= {
            id(leaf)
            for leaf, grad in noted
            if grad is not None and any(memory(x) in externals for x in parts(grad))
        }
        # It may ask which leaves have a gradient at all.
        asked = noted if used or bound else [(leaf, leaf.grad) for leaf in findings.stepped]
        used |= {id(leaf) for leaf, grad in asked if grad is None and leaf.grad is None}
        findings.owners = [leaf for leaf in findings.leaves if id(leaf) in used]

    def _note_memory(self, leaves: Sequence[Any], recorder: Recorder) -> None:
        """Record the leaves of the result, and what the run has made and read of earlier runs."""
        findings, touched = self._findings, recorder.memory
        findings.outputs = [
            (empty_repeated if 0 in x.stride() else torch.empty_like)(x, device="meta")
            if type(x) in LENT and x.untyped_storage()._cdata in touched.made
            else None
            for x in leaves
        ]
        earlier = {k for k in touched.externals if findings.lives(k) or self._first.has_made(k)}
        findings.carried = earlier - findings.empty
        findings.made.update(touched.made)
        findings.outside = touched.reads

    def _note_changes(
        self,
        run: WarmUpRun,
        objects: PythonState,
        touched: TouchedMemory,
        every: Sequence[Change],
    ) -> None:
        """Raise for Python state that each run changes; tensors are bound at each replay."""
        findings = self._findings
        others = [x for x in every if (x.where, x.name) not in run.changed]
        changes = [x for x in others if not touched.is_written(x.memory)]
        findings.by_parts |= run.changed.keys()
        other = {(x.where, x.name) for x in changes if not x.is_plain} | findings.by_parts
        findings.sets = [x for x in findings.sets if (x.where, x.name) not in other]
        tensor_ids = {id(x) for x in objects.tensors} - {id(x) for x in self._call.tensors}
        for change in every:
            if change.has_place and change.now is not run.changed.get(
                (change.where, change.name), change.now
            ):
                raise GraphError(
                    f"the function and an eager part of it both bind {change.name}, and a replay "
                    f"would not know which comes last; bind it in one of them"
                )
        for change in changes:
            if id(change.now) in tensor_ids:
                raise GraphError(
                    f"the function rebinds {change.name} to a different tensor in each run; a "
                    f"replay would always bind the captured one. Call copy_(...) on it instead"
                )
            if change.counts:
                raise GraphError(
                    f"the function changes {change.name} in each run ({change.before!r:.40}, then "
                    f"{change.now!r:.40}), but a replay runs no Python; change it outside the "
                    f"function, or in a part that is marked with commlib.graph.eager"
                )
        findings.binds = any(holds_tensor(change.now) for change in changes)
        rebinds = not all(change.is_plain for change in changes)
        findings.roots = self._first.roots if rebinds else ()
