"""One captured call: its graphs, the tensors that they read, and how the next calls use them."""

import time
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch

from commlib.graph.calls.bindings import Bindings
from commlib.graph.calls.cache_key import Arguments
from commlib.graph.calls.leaves import Tensors
from commlib.graph.calls.outputs import Outputs
from commlib.graph.calls.tensor_places import NO_PLACES
from commlib.graph.operators.program_line import ProgramLine
from commlib.graph.recording.externals import Externals
from commlib.graph.recording.inputs import Inputs
from commlib.graph.recording.recorded_call import Recipe, kept_grads, reading, record_call
from commlib.graph.recording.segments import Segments
from commlib.graph.replaying.call_effects import CallEffects
from commlib.graph.replaying.call_gradients import Gradients, NoGradients
from commlib.graph.replaying.schedule import Schedule
from commlib.graph.replaying.verification_log import VerificationLog
from commlib.graph.replaying.verify import Verification
from commlib.graph.watching.runs import DonePart, check_foreign

Line = ProgramLine | None
Done = Sequence[DonePart] | None  # what eager parts did in a verified call
NO_GRADIENTS = NoGradients()


class CapturedCall:
    """A call that was recorded, and is replayed on the tensors of each call of its kind.

    Attributes:
        segments: Its graphs.
        together: Whether all ranks replay it, or a backward of it, together.
        inputs: Where it reads its arguments.
        effects: What it changes outside itself.
        outputs: What it returns.
        log: What its verified calls have shown.
        replays: The number of calls that it was used for.
        bytes_copied: What the last of them copied to where the graphs read it.
        launch_seconds: Host time of one of the replays.
        capture_seconds: What the capture has cost.
        lost: It was to be captured again, and could not.
        has_eager_parts: Whether Python runs between its graphs.
        places: Where lists, dicts and optimizers hold tensors that it uses.
    """

    def __init__(self, recipe: Recipe, log: VerificationLog, schedule: Schedule) -> None:
        self._recipe, self._schedule, self.log = recipe, schedule, log
        self.segments: Segments
        self.outputs: Outputs
        self._backwards: list[Segments] = []
        self.inputs = Inputs()
        self.replays = self.bytes_copied = 0
        self.launch_seconds: float | None = None
        self.capture_seconds = 0.0
        self.lost = self.has_eager_parts = self.together = False
        self.places = NO_PLACES

    # -- capture -----------------------------------------------------------------------------------

    def capture(
        self,
        call: Arguments,
        gradients: Gradients = NO_GRADIENTS,
        *,
        later: bool = False,
        done: Done = None,
    ) -> None:
        """Capture the first call.

        Args:
            call: The call.
            gradients: How gradients flow back through it.
            later: Another slot was captured before, so that no other rank is asked.
            done: What the eager parts did already in a verified call.
        """
        arguments = range(len(call.tensors) - call.grads)
        if own_inputs := self._recipe.own_inputs:
            self.inputs.make_room(call, arguments)
        self._record(call, gradients, again=later, done=done)
        if self.segments.reads and not own_inputs:  # a later capture may find other values
            self.inputs.make_room(call, arguments)
            self.outputs.release("the second capture")
            self.segments.release()
            self._record(call, gradients, again=True, done=done)
        self.log.uncaptured = self.segments.reports_capture

    def _record(
        self, call: Arguments, gradients: Gradients, *, again: bool, done: Done = None
    ) -> None:
        began = time.perf_counter()
        gradients.prepare()
        recorded = record_call(self._recipe, call, self.inputs, again=again, done=done)
        self.segments, args = recorded.segments, recorded.given
        self.has_eager_parts = self.segments.broken
        self.together = bool(self.segments.collectives)
        self._externals = Externals(self.segments.recorders, recorded.arguments)
        recipe, is_own, findings = self._recipe, self._is_own, self._recipe.findings
        self.outputs = Outputs(recorded.result, args, is_own, findings.lasting, copy=recipe.copy)
        self._bindings = Bindings(recorded.bindings, findings.sets, args, is_own, findings.lasting)
        self._externals.watch(self._bindings.tensors())
        self.effects = CallEffects(self.inputs, recipe, recorded.grads, self._bindings)
        self._only_launches = not (self.effects.gives or self.outputs.any_borrowed)
        gradients.recorded(recorded, self.outputs, again=again)
        self.capture_seconds = time.perf_counter() - began

    def _is_own(self, tensor: torch.Tensor) -> bool:
        rooms = self._recipe.rooms
        return any(tensor is buffer for buffer in rooms) or self.segments.has_made(tensor)

    # -- replay ------------------------------------------------------------------------------------

    def run(self, call: Arguments, caller: FrameType, turn: int) -> Any:
        """Replay on the tensors of ``call`` and return the outputs; the host does not block.

        ``turn``: the number of this replay among those of all kinds, which counts where a graph has
        collectives: ranks may make the same ones in calls of other kinds.
        """
        number = turn if self.together else self.replays + 1
        if self._schedule.due(number) and self.fits_all:
            return self._verified(call, caller)
        return self.replay(call, caller)

    def replay(
        self,
        call: Arguments,
        caller: FrameType,
        gradients: Gradients = NO_GRADIENTS,
        done: Done = None,
    ) -> Any:
        """Replay on the tensors of ``call``; ``done``: what the eager parts did already."""
        tensors = call.tensors
        pointers = [tensor.data_ptr() for tensor in tensors]
        with self.segments.lock:
            self.segments.turn()
            self.bytes_copied = 0
            fresh = None if pointers == self.inputs.pointers else self._place(call, pointers)
            if not fresh:
                line = None
                if self.outputs.any_borrowed:
                    line = ProgramLine.of(caller)
                    self.outputs.expire("the call at", line)
                self.replays += 1
                timed = not self.replays & (self.replays - 1)  # seldom: the clock takes its time
                began = time.perf_counter() if timed else 0.0
                if self.segments.broken:
                    self._replay_parts(call, done)
                else:
                    self.segments.replay()
                if timed:
                    self.launch_seconds = time.perf_counter() - began
                if self._only_launches:
                    return self.outputs.give(tensors)
                return self._outcome(tensors, line, gradients)
        self._capture_again(call, fresh, caller, gradients, done)  # replays do not wait for it
        return self.first(call, caller, gradients)

    def first(self, call: Arguments, caller: FrameType, gradients: Gradients = NO_GRADIENTS) -> Any:
        """Run what the capture has not run, and return the outputs."""
        with self.segments.lock:
            self.replays += 1
            self.segments.turn()
            self.segments.replay_rest()
            return self._outcome(call.tensors, ProgramLine.of(caller), gradients)

    def _replay_parts(self, call: Arguments, done: Done) -> None:
        """Replay graphs and eager parts; these find the gradients that the graphs have."""
        before, inputs = self._bindings.now(), self.inputs
        leaves = self._recipe.findings.leaves
        with kept_grads(leaves), reading(call, inputs.of(call)), inputs.noting_writes():
            self.segments.replay(done)
        self._bindings.check(before)

    def _outcome(self, tensors: Tensors, where: Line, gradients: Gradients) -> Any:
        """Give the program what a replay has computed; return outputs borrowed at ``where``."""
        if self.effects.gives:
            self.effects.give(tensors)
        result = self.outputs.give(tensors, where, gradients.join(tensors))
        if self._bindings.names:
            self._bindings.bind(tensors, result)
        return result

    def _place(self, call: Arguments, pointers: Sequence[int]) -> list[int]:
        """Copy moved arguments to the graph's memory; return positions without such memory.

        What is copied may be an output of the last replay, so that one expires after this.
        """
        self.inputs.check(call.tensors, pointers)
        moved = [i for i, at in enumerate(pointers) if at != self.inputs.pointers[i]]
        self.inputs.put(call, [i for i in moved if i in self.inputs.copies])
        self.bytes_copied = sum(call.tensors[i].nbytes for i in moved)
        return [i for i in moved if i not in self.inputs.copies]

    def _capture_again(
        self,
        call: Arguments,
        positions: Iterable[int],
        caller: FrameType,
        gradients: Gradients,
        done: Done,
    ) -> None:
        """Capture the call with the graphs' own memory for some of its arguments."""
        check_foreign()
        self.inputs.make_room(call, positions)
        self.lost = True
        self.outputs.release("the call at", ProgramLine.of(caller))
        self.segments.release()
        self._record(call, gradients, again=True, done=done)
        self.lost = False

    # -- verification ------------------------------------------------------------------------------

    @property
    def fits_all(self) -> bool:
        """Return False if a rank may have to leave out a replay, and its collectives."""
        return not (self.segments.collectives and self.segments.reads)

    def _verified(self, call: Arguments, caller: FrameType) -> Any:
        """Run the function for real and its graph after that; both must give the same."""
        self.begin_verified(call)
        args, kwargs = call.given
        verified = self.verification("output", self.segments, call).run(
            lambda: self._recipe.fn(*args, **kwargs),
            lambda done: self.replay(call, caller, done=done),
        )
        self.log.uncaptured = False
        self.log.note(verified.seconds, verified.eager_seconds)
        return verified.found

    def begin_verified(self, call: Arguments) -> None:
        """Order the current stream after the last replay, which may have written what is read.

        Raises ``GraphError`` for arguments that the graph can't take, before anything runs.
        """
        pointers = [tensor.data_ptr() for tensor in call.tensors]
        if pointers != self.inputs.pointers:
            self.inputs.check(call.tensors, pointers)
        self.segments.turn()

    def verification(self, what: str, segments: Segments, call: Arguments | None) -> Verification:
        """Return what verifies a call of one of the graphs; a backward has no ``call``."""
        reachable = (reference() for reference in self._recipe.findings.reachable)
        return Verification(
            segments,
            self.effects.of(call, self.graphs),
            self.log,
            what,
            [x for x in reachable if x is not None],
            [self._recipe.fn, *(() if call is None else call.given)],
            self._bindings.names if call is not None else set(),
            self.log.uncaptured,
        )

    @property
    def parts(self) -> list["CapturedCall"]:
        """Return the entry as one of a report."""
        return [] if self.lost else [self]

    @property
    def graphs(self) -> list[Segments]:
        """Return all that it replays."""
        return [self.segments, *self._backwards]

    def go_back_by(self, backwards: Sequence[Segments]) -> None:
        """Note the graphs of its backwards."""
        self._backwards = [*backwards]
        self.together = any(segments.collectives for segments in self.graphs)

    def drop_lost(self) -> bool:
        """Return True if its graphs are lost."""
        return self.lost

    def moved(self) -> list[torch.Tensor]:
        """Return the tensors from outside that are no longer where the graph reads them."""
        return self._externals.moved()

    @property
    def stale(self) -> bool:
        """Return True if the program has released a tensor that the graph reads."""
        return self._externals.gone

    def uses(self, key: int) -> bool:
        """Return True if the graphs read or write the memory that ``key`` names, or bind it."""
        memories = (each.memory for segments in self.graphs for each in segments.recorders)
        return any(key in each.externals for each in memories) or key in self._bindings.memory()

    def release(self) -> None:
        """Release the graphs and all that they read; reading their outputs raises from then on.

        Torch swaps the content of no tensor that a weak reference points to.
        """
        self.outputs.expire("the release of the graph")
        self.segments.release()
        self._externals.forget()
        self.places = NO_PLACES
        self._recipe.findings.reachable.clear()
