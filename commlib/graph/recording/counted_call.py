"""The first call of a kind. Its result and effects count, unless the capture fails."""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from commlib.core.tensors import has_memory, parts
from commlib.errors import CommError, GraphError
from commlib.graph.backends.base import Backend
from commlib.graph.calls.bindings import kept
from commlib.graph.calls.cache_key import Arguments
from commlib.graph.calls.leaves import noting_histories
from commlib.graph.calls.openable import Contents, changed, exchanged, first_of
from commlib.graph.operators.schema import memory
from commlib.graph.operators.unsupported import (
    check_continued,
    check_python_random,
    check_tied,
    check_unseen,
)
from commlib.graph.python.changes import Change
from commlib.graph.python.iterators import Positions, check_taken
from commlib.graph.python.look_error import look_error
from commlib.graph.python.python_state import PythonState
from commlib.graph.python.reach import reached
from commlib.graph.recording.capture_run import without_saved_hooks
from commlib.graph.recording.findings import Findings
from commlib.graph.recording.rank_agreement import raise_together
from commlib.graph.watching.digest import digests, whole
from commlib.graph.watching.real_call import RealCall
from commlib.graph.watching.runs import WarmUpRun
from commlib.graph.watching.undo import UndoLog

_NO_STATE = PythonState(())


class CountedCall:
    """A real call that is observed, so that it can be undone.

    Attributes:
        findings: What is known of the function.
        counted: Whether the call counts even where no capture follows, so that nothing is copied.
        roots: What leads to the Python objects that the function can reach.
        drawn: The generators that it draws from.
        begins_grads: Whether it has given a gradient to a leaf that had none.
        after: The Python state that it has left.
        result: What it has returned, until ``forget``.
        histories: Positions of tensors of the call: a backward inside it went through what these
            were computed from.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        backend: Backend,
        findings: Findings,
        *,
        counted: bool,
        weights: Sequence[torch.Tensor],
    ) -> None:
        """``weights``: leaves that the function can reach and that may have gradients."""
        self.findings, self.counted = findings, counted
        self.roots: list[object] = []
        self.drawn: list[torch.Generator] = []
        self.histories: Set[int] = frozenset()
        self.weights, self.result = weights, None
        self._fn, self._backend = fn, backend
        self._real = RealCall(backend.device, (), copies=not counted)
        self._before = self.after = _NO_STATE
        self.begins_grads = False
        self._opened: Contents = []
        self._problem: GraphError | None = None  # what a look at the call's effects has found

    def make(self, call: Arguments, opened: Contents, after_call: Callable[[], None]) -> Any:
        """Make the call. Either all members of its rings succeed, or all raise.

        Args:
            call: The call.
            opened: Its objects that can be opened, with what they hold before it.
            after_call: Looks at what is around the function, once the call has been made.
        """
        args, kwargs = call.given
        self.roots = [self._fn, args, kwargs]
        result, problem, run = None, None, WarmUpRun(self._real.undo, self.roots)
        self._before = PythonState(self.roots)
        run.positions = positions = Positions(self._before.objects)
        self._real.note_leaves(self.weights)
        self._opened = opened
        held = _memory_of(self._before.tensors or reached(self.roots).tensors)
        bits = digests(held)
        histories = [x.grad_fn for x in call.tensors]
        has_history = any(node is not None for node in histories)
        noting: AbstractContextManager[Set[int]] = nullcontext(frozenset())
        if has_history:
            noting = noting_histories(call.tensors)
        unhooked = without_saved_hooks()
        with self._backend.calling(), run.under_way(), unhooked, noting as self.histories:
            try:
                result = self._real.run(lambda: self._fn(*args, **kwargs))
            except Exception as error:
                problem = error
            rings = [ring for _, ring in sorted(self._real.rings.items())]
            self._backend.join(rings)
        self.drawn = [generator for generator, _ in self._real.undo.generators]
        self.begins_grads = self._real.begins_grads()
        try:
            raise_together(rings, (), problem, counted=self.counted)
        except CommError:
            self.undo()
            raise
        pairs = zip(held, bits, digests(held), strict=True)
        changed = [whole(x) for x, before, after in pairs if before != after and x.nbytes()]
        self._note_run(run, rings, changed)
        after = [x.grad_fn for x in call.tensors]
        self.findings.continued = [i for i, node in enumerate(histories) if node is not after[i]]
        self.result = result
        problem = self._look(call, result, positions, after_call)
        self._problem = self._agreed(rings, problem) if rings else problem
        return result

    def check(self) -> None:
        """Raise ``GraphError`` for a call that no graph could repeat, on every member of its rings.

        It is also raised where an object can't be looked at any more. The call counts.
        """
        if self._problem is not None:
            raise self._problem

    def _note_run(
        self, run: WarmUpRun, rings: Sequence[Any], changed: Sequence[torch.Tensor]
    ) -> None:
        """Record what the run shows; ``changed``: memory that holds something else since."""
        results, real = self.findings, self._real
        results.rings, results.broken, results.by_parts = list(rings), run.broken, set(run.changed)
        written = real.written  # that of eager parts is in the log
        results.unseen = [
            x for x in changed if memory(x) not in written and not real.undo.has_noted(memory(x))
        ]

    def _look(
        self, call: Arguments, result: Any, positions: Positions, after_call: Callable[[], None]
    ) -> GraphError | None:
        """Look at what the call has left, iterators first; return why no graph can repeat it."""
        try:
            positions.note()
            self.findings.taken, self.findings.draws = positions.taken, positions.draws
            after_call()
            self.after = PythonState(self.roots)
            self._find(call, result)
            self._check()
        except GraphError as error:
            return error
        except Exception as error:
            problem = look_error(error)
            problem.__cause__ = error
            return problem
        return None

    def _agreed(self, rings: Sequence[Any], problem: GraphError | None) -> GraphError | None:
        """Return the error of all members: this rank's ``problem``, or that of another one."""
        try:
            raise_together(rings, (), problem, counted=False)
        except GraphError as error:
            return error
        except CommError:
            self.undo()
            raise
        return None

    def _find(self, call: Arguments, result: Any) -> None:
        """Record how the call has changed Python objects and gradients."""
        findings = self.findings
        changes = [x for x in self._before.changes() if x.has_place]
        findings.sets = [kept(x, call.tensors) for x in changes if self._is_kept(x, call)]
        others = [x for x in changes if (x.where, x.name) not in findings.by_parts]
        findings.hands_back = _handed_back(call, self._opened, result, others)
        arg_ids, noted = {id(x) for x in call.tensors}, [*self._real.undo.grads]
        findings.leaves = [leaf for leaf, _ in noted if id(leaf) not in arg_ids]
        findings.binds_grads = any(leaf.grad is not grad for leaf, grad in noted)
        findings.note_reachable(self.after.tensors)
        findings.lasting.before = result, self.after

    def _check(self) -> None:
        """Raise ``GraphError`` for what no graph could repeat."""
        findings = self.findings
        check_tied(self._real.undo.tied)
        if findings.continued:
            check_continued(findings.continued[0])
        check_taken(findings.taken)
        if findings.draws:
            check_python_random()
        if findings.hands_back:
            raise GraphError(
                f"the function {findings.hands_back}, and a replay would give the object of the "
                f"capture; return or bind what it holds instead"
            )
        check_unseen(findings.unseen)

    def _is_kept(self, change: Change, call: Arguments) -> bool:
        """Return True for plain values, values of the call, and tensors that it has not made."""
        if isinstance(change.now, torch.Tensor):
            return not self.has_made(memory(change.now))
        return change.is_plain or any(change.now is x for x in call.leaves)

    def has_made(self, key: int) -> bool:
        """Return True if the call has made the memory that ``key`` names."""
        return key in self._real.made

    def undo(self) -> None:
        """Undo the effects of the call, unless it counts."""
        if not self.counted:
            self._real.undo.restore()
            self._before.restore()

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
            self.findings.undo.restore()  # what a capture around eager parts has done
            self._real.undo.swap()
            for owner, grad in grads:
                owner.grad = grad
            self.after.restore()

    def forget(self) -> None:
        """Release what only the first call needs."""
        self._real.undo = UndoLog()
        self._before = self.after = _NO_STATE
        lasting = self.findings.lasting
        lasting.before, lasting.there = None, set()
        self._opened, self.roots, self.result = [], [], None


def _handed_back(call: Arguments, opened: Contents, result: Any, changes: Sequence[Change]) -> str:
    """Return how a call hands out an object that a replay has another one of; "" if it does not."""
    if not opened:
        return ""
    objects = exchanged(*call.given, {*call.closed, *changed(opened)})
    match = first_of(objects, result)
    if match is not None:
        return f"returns an argument that is a {type(match).__qualname__}"
    for change in changes:
        match = first_of(objects, change.now)
        if match is not None:
            return f"binds {change.name} to an argument that is a {type(match).__qualname__}"
    return ""


def _memory_of(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return each piece of memory that holds tensors."""
    held = (part for x in tensors for part in parts(x))
    plain = [x for x in held if has_memory(x) and x.numel()]
    return [*{memory(x): x.untyped_storage() for x in plain}.values()]
