"""Further runs of a function whose graph differs, and what they show."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch

from commlib.graph.replaying.compare import Left, Noise
from commlib.graph.watching.effects import Effects
from commlib.graph.watching.outside_reads import OtherRead, OutsideReads, first_other


@dataclass
class FurtherRuns:
    """Findings of the further runs so far.

    Attributes:
        noise: What differs between them.
        real: What the verified run left, if they begin from the same state as that one.
        first: What the first of them left.
        names: The operators of the last one, with their plain arguments.
        reads: What the last one has read from outside.
        other: The first operator that has read other memory in one of them.
        failed: Whether one has raised.
    """

    noise: Noise
    real: Left | None = None
    first: Left | None = None
    names: Sequence[str] = ()
    reads: OutsideReads | None = None
    other: OtherRead | None = None
    failed: bool = False

    def note_reads(self, reads: OutsideReads, lasting: Container[int]) -> None:
        """Compare what a run has read with the run before; ``lasting``: as for ``first_other``."""
        if self.reads is not None and self.other is None:
            self.other = first_other(self.reads, reads, made=(), lasting=lasting)
        self.reads = reads

    def cause(self, captured: Sequence[str], *, uncaptured: bool) -> str:
        """Return what they do otherwise than at the capture.

        ``captured``: its operators; ``uncaptured``: whether the runs got the answer "not captured".
        """
        if self.other is not None:
            return str(self.other)
        if uncaptured:
            return "the function asks whether it is captured and behaves differently when it is"
        for number, (before, after) in enumerate(zip(captured, self.names, strict=False)):
            if before != after:
                return f"operator {number} was {before} at the capture, and is {after} now"
        if len(captured) != len(self.names):
            return f"{len(captured)} operators ran at the capture, and {len(self.names)} now"
        return (
            "the same operators ran with the same numbers. Possible causes: a replaced tensor, a "
            "generator that torch does not know, or a kernel that writes memory outside torch's "
            "operators"
        )


def keeps_state(effects: Effects, states: Sequence[torch.Tensor], real: Left) -> bool:
    """Return True if the verified run left the state from which it began, as far as is known.

    Attention without dropout has a generator, and draws no numbers from it.

    Args:
        effects: What the graph changes outside itself.
        states: Of its generators, before the run.
        real: What the run has left.
    """
    drawn = not all(map(torch.equal, states, real.held.generators))
    return not (drawn or effects.tensors or effects.leaves or real.bound)
