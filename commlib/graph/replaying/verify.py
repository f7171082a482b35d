"""Verified replays: the function runs for real, and its graph must then give the same bits.

On a verified call the function runs eagerly, so its result and the program's Python state are right
by construction. What it wrote is put back, the graph is replayed on the same inputs, and both are
compared bit for bit. Where they differ, the eager effects are kept.
"""

import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from commlib.core import observers
from commlib.core.ring import Ring
from commlib.core.tensors import has_memory, parts
from commlib.errors import CommError, GraphError
from commlib.graph.python.changes import Change
from commlib.graph.python.python_state import PythonState
from commlib.graph.recording.segments import Segments
from commlib.graph.replaying.compare import Comparison, Difference, Left, Noise
from commlib.graph.replaying.further_runs import FurtherRuns, keeps_state
from commlib.graph.replaying.outcome import (
    DIFFERS,
    EQUAL,
    RAISED,
    Unequal,
    Verified,
    elsewhere,
    worst,
)
from commlib.graph.replaying.second_look import second_look
from commlib.graph.replaying.stopwatch import Stopwatch
from commlib.graph.replaying.verification_log import VerificationLog
from commlib.graph.replaying.write_counts import WriteCounts
from commlib.graph.watching.capture_query import reporting
from commlib.graph.watching.effects import Effects, Held
from commlib.graph.watching.host import OtherValue
from commlib.graph.watching.outside_reads import OutsideReads, keys_of
from commlib.graph.watching.real_call import RealCall
from commlib.graph.watching.runs import DonePart, VerifiedRun, under_way
from commlib.log import log

Replay = Callable[[Sequence[DonePart]], Any]  # gets what eager parts did in the verified run

_LEAST_RUNS, _MOST_RUNS = 2, 24  # of a function whose graph differs, to see whether its own runs do


class Verification(NamedTuple):
    """A verified call of a graph, and its settings.

    Attributes:
        segments: The graph, with its eager parts.
        effects: What it changes outside itself.
        log: How results are compared, and what the function gives other bits of each time.
        what: What the results are called in errors.
        reachable: Tensors that the function can reach.
        roots: What leads to the Python objects that it may change.
        binds: The names that a replay binds, and the objects that have them.
        uncaptured: Whether the function gets the answer "not captured" this once. It may take
            another branch then, whose last digits differ: half of the digits are compared.
        tied: Returns what the function has made in the form that the program gets, where that
            counts: with its gradients.
        same_graph: Whether a further replay would be of the same graph.
    """

    segments: Segments
    effects: Effects
    log: VerificationLog
    what: str
    reachable: Sequence[torch.Tensor]
    roots: Sequence[object]
    binds: Set[tuple[int, str]]
    uncaptured: bool
    tied: Callable[[Sequence[Any]], list[Any]] = list
    same_graph: bool = True

    def run(self, fn: Callable[[], Any], replay: Replay) -> Verified:
        """Run ``fn`` for real and its graph after that, and compare.

        ``replay`` gets the eager parts of that run, which do the same again.
        Every member of the rings does so in the same call. Nobody watches the function: the call
        costs what an eager one does, the copies of what it writes, and the comparison.

        Raises:
            Unequal: They differ, here or on another member. The effects of ``fn`` are kept.
        """
        with self.segments.trimmed():
            return self._run(fn, replay)

    def _run(self, fn: Callable[[], Any], replay: Replay) -> Verified:
        effects, watch = self.effects, Stopwatch(self.segments.device)
        run = VerifiedRun(self.roots, self.reachable)
        before, counts = effects.now(), WriteCounts(self.reachable)
        objects = PythonState(self.roots)
        began = time.perf_counter()
        expected = self._called(run, fn)
        seconds = time.perf_counter() - began

        def keep_eager(kept: Any) -> Verified:
            return Verified(kept, kept, seconds, watch.seconds(), replayed=False)

        self.segments.join(self.rings)  # a raw collective without fences may still run
        by_parts = run.changed - self.binds
        bound = [x for x in objects.changes() if x.sets and (x.where, x.name) not in by_parts]
        if worst(self.rings, EQUAL) == RAISED:  # that rank will make no collectives now
            return keep_eager(self._tied(expected, bound))
        missed = counts.missed(effects, run.effects())
        real = Left({self.what: expected}, bound, self._put_back(run, before))
        states = before.generators
        del before
        outcome, problem, replayed = self._compared(run, replay, real, missed)
        if replayed is None or outcome != EQUAL:
            expected = self._let_stand(run, real)
        if outcome == DIFFERS:
            runs = self._again(fn, real, None if missed else replayed, states)
            if replayed is not None and not missed:  # what is noise does not count
                problem = next(self._compare().differences(real, replayed), None)
            small = not (missed or run.parts) and self._is_small(real, replayed, runs)
            look = partial(self._replayed_again, replay, real, runs)
            problem = second_look(self.rings, problem, look, self.log, small=small)
            if worst(self.rings, DIFFERS if problem else EQUAL) == DIFFERS:
                cause = runs.cause(self.segments.own_names, uncaptured=self.uncaptured)
                raise Unequal(problem or elsewhere(self.rings), cause, expected)
        elif outcome == EQUAL and replayed is not None:
            effects.put_versions(real.held)
            actual = replayed.results[self.what]
            return Verified(expected, actual, seconds, watch.seconds(), replayed=True)
        return keep_eager(expected)

    def _called(self, run: VerifiedRun, fn: Callable[[], Any]) -> Any:
        """Return ``fn()``; an error of it is one of all members."""
        try:
            with under_way(run), self._reporting():
                return observers.finished(fn)
        except Exception:
            with suppress(CommError):
                worst(self.rings, RAISED)
            raise

    def _compared(
        self, run: VerifiedRun, replay: Replay, real: Left, missed: Difference | None
    ) -> tuple[int, Difference | None, Left | None]:
        """Replay after ``real``; returns the outcome, this member's difference, and what was left.

        ``missed``: a difference that is known before.
        """
        try:
            for change in real.bound:
                change.undo()
            problem, replayed = self._replayed(run, replay, real)
            problem = problem or missed
            outcome = worst(self.rings, DIFFERS if problem else EQUAL)
            if replayed is not None and outcome == DIFFERS:
                replayed = replayed._replace(held=self.effects.now())
        except BaseException:
            self._let_stand(run, real)
            raise
        return outcome, problem, replayed

    def _replayed(
        self, run: VerifiedRun, replay: Replay, real: Left
    ) -> tuple[Difference | None, Left | None]:
        """Replay; returns the first difference, and what was left if the graph fits the call."""
        try:
            result = replay(run.parts)
        except OtherValue:  # the graph is of other values, and the eager effects are kept
            return None, None
        except GraphError as error:
            return Difference(("replay", 0), "the replay", f"raises: {error}"), None
        left = self._left(result, real.bound)
        return next(self._compare().differences(real, left), None), left

    @property
    def rings(self) -> list[Ring]:
        """Return the rings whose members verify together."""
        return self.segments.rings

    def _compare(self, *, half: bool = False) -> Comparison:
        half = half or self.uncaptured
        return Comparison(self.effects, self.log.tolerance, self.log.noise, half=half)

    def _is_small(self, real: Left, replayed: Left | None, runs: FurtherRuns) -> bool:
        """Return True for a difference in last digits that a second replay may explain.

        Python code that binds names may take another branch the next time, and a function that
        reads other memory in each run has no graph.
        """
        may_branch = real.bound or self.uncaptured or runs.other is not None
        if replayed is None or runs.first is None or may_branch:
            return False
        differences = self._compare(half=True).differences(real, replayed)
        return self.same_graph and self.log.is_steady and not any(True for _ in differences)

    def _replayed_again(self, replay: Replay, real: Left, runs: FurtherRuns) -> Difference | None:
        """Replay from where the further runs began, undo it; returns its difference from a run."""
        assert runs.first is not None
        try:
            left = self._left(replay(()), real.bound)
            return next(self._compare().differences(runs.first, left), None)
        except (GraphError, OtherValue):
            return Difference(("replay", 0), "a second replay", "fails")
        finally:
            self.effects.put(real.held)

    def _reporting(self) -> AbstractContextManager[None]:
        return reporting(self.segments.reports_capture and not self.uncaptured)

    def _left(self, result: Any, bound: Sequence[Change]) -> Left:
        """Return what the program sees now, also under the names that the function binds."""
        now = [change.again() for change in bound]
        return Left({self.what: result}, now, self.effects.here())

    def _put_back(self, run: VerifiedRun, before: Held) -> Held:
        """Restore what the call has changed; return the state that it left.

        That takes the place of ``before``, so that there is one copy at any time. Eager parts may
        write the same memory, and are put back first.
        """
        if not run.parts:
            return self.effects.exchange(before)
        real = self.effects.now()
        run.restore()
        self.effects.put(before)
        return real

    def _let_stand(self, run: VerifiedRun, real: Left) -> Any:
        """Give the program back what the function has left, and return the result."""
        run.again()
        self.effects.put(real.held)
        return self._tied(real.results[self.what], real.bound)

    def _tied(self, result: Any, bound: Sequence[Change]) -> Any:
        """Bind names as the function has, and return its result; both as the program gets them."""
        tied, *names = self.tied([result, *(change.now for change in bound)])
        for change, now in zip(bound, names, strict=True):
            change.place.bind(now)
        return tied

    def _again(
        self, fn: Callable[[], Any], real: Left, replayed: Left | None, states: list[torch.Tensor]
    ) -> FurtherRuns:
        """Run ``fn`` some more times; ``states``: of generators before its verified run.

        What it gives other bits of is noise from now on, unless it reads other memory each time.
        Most runs may have the same bits, so it runs until noise explains all differences.
        """
        same = not self.uncaptured and keeps_state(self.effects, states, real)
        runs = FurtherRuns(Noise(self.log.noise), real if same else None)
        lasting = keys_of(part for x in self.reachable for part in parts(x) if has_memory(part))
        for number in range(_MOST_RUNS if self.log.tolerance is None else 1):
            if number >= _LEAST_RUNS and not self._goes_on(runs, real, replayed):
                break
            reads = None if runs.failed else self._run_again(runs, fn, real.bound)
            if reads is not None:
                runs.note_reads(reads, lasting)
        if runs.other is None:
            self.log.note_noise(runs.noise)
        return runs

    def _run_again(
        self, runs: FurtherRuns, fn: Callable[[], Any], bound: Sequence[Change]
    ) -> OutsideReads | None:
        """Run ``fn`` once more, observed and then undone; returns what it has read.

        None if it raises.
        """
        watched, objects = RealCall(self.segments.device, (), named=True), PythonState(self.roots)
        watched.note_leaves(x for x in self.reachable if x.is_leaf and x.requires_grad)
        try:
            with under_way(VerifiedRun()), self._reporting():
                result = watched.run(fn)
            self.segments.join(self.rings)
            left = self._left(result, bound)._replace(held=self.effects.now())
            compare = partial(Comparison, self.effects, self.log.tolerance)
            if runs.first is None:
                runs.first = left
            else:
                runs.noise.note(compare, runs.first, left, half=self.uncaptured)
            if runs.real is not None:
                runs.noise.note(compare, runs.real, left, small=True)
        except Exception as error:  # one too many: it has filled its cache to the end
            log.once("a function whose graph differs can't be run once more: %s", error)
            runs.failed = True
        finally:
            runs.names = watched.names
            watched.undo.restore()
            objects.restore()
        return None if runs.failed else watched.reads

    def _goes_on(self, runs: FurtherRuns, real: Left, replayed: Left | None) -> bool:
        """Return True if all members make one more run: noise does not explain all differences."""
        said = EQUAL
        if replayed is not None and runs.other is None:
            compare = Comparison(self.effects, None, runs.noise, half=self.uncaptured)
            said = DIFFERS if any(True for _ in compare.differences(real, replayed)) else EQUAL
        return worst(self.rings, RAISED if runs.failed else said) == DIFFERS
