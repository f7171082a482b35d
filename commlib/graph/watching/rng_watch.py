"""The generators that a run draws from; a run that sets one of them raises."""

from collections.abc import Sequence

import torch

from commlib.graph.operators.generators import RngTracker, default_generator, generators_of
from commlib.graph.operators.schema import OpCall
from commlib.graph.operators.unsupported import check_seeding
from commlib.graph.watching.undo import UndoLog


class RngWatch:
    """Draws and settings of generators in a run.

    Attributes:
        generators: Those that it draws from, by id.
    """

    def __init__(
        self,
        device: torch.device,
        drawn: Sequence[torch.Generator] | None,
        undo: UndoLog,
        *,
        captured: bool,
    ) -> None:
        """Store the run.

        Args:
            device: Where the function runs.
            drawn: The generators that the run before has drawn from, where there was one.
            undo: Notes the states that generators had.
            captured: It is captured on a GPU, whose generators have no state then to be asked for.
        """
        self.generators: dict[int, torch.Generator] = {}
        self._device, self._drawn, self._undo, self._captured = device, drawn, undo, captured
        self._trackers: dict[int, RngTracker] = {}  # by generator

    def begin(self) -> None:
        """Record where the generators are before the run."""
        if self._captured:
            return
        for generator in (default_generator(self._device), *(self._drawn or ())):
            if id(generator) not in self._trackers:
                self._trackers[id(generator)] = RngTracker(generator)

    def end(self) -> None:
        """Raise ``GraphError`` for a run that has set a generator after it drew from it."""
        for generator in () if self._captured else self.generators.values():
            self._check(generator)

    def note(self, call: OpCall) -> list[torch.Generator]:
        """Return the generators of an operator, after recording their states before its draw."""
        generators = generators_of(call, self._device)
        for generator in generators:
            self._note(generator)
        return generators

    def _note(self, generator: torch.Generator) -> None:
        if not self._captured:
            if self._drawn is not None and id(generator) not in self._trackers:
                check_seeding()  # the function makes one at each call
            self._check(generator)
        if id(generator) not in self.generators:
            self.generators[id(generator)] = generator
            if not self._captured or generator.device.type == "cpu":
                self._undo.note_generator(generator)

    def record_state(self, generator: torch.Generator) -> None:
        """Record the state after a draw."""
        if self._captured:
            return
        tracker = self._trackers.get(id(generator))
        if tracker is None:
            self._trackers[id(generator)] = RngTracker(generator)
        else:
            tracker.record_state()

    def _check(self, generator: torch.Generator) -> None:
        """Raise for a run that sets a generator it draws from: a graph continues its state."""
        tracker = self._trackers.get(id(generator))
        if tracker is not None and tracker.was_set():
            self.generators[id(generator)] = generator
            self._undo.note_generator(generator, tracker.begun)
            check_seeding()
