"""Further runs of a function whose graph differs, and what they show."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from commlib.graph.replaying.compare import Left, Noise
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

    def cause(self, captured: Sequence[str]) -> str:
        """Return what they do otherwise than at the capture, whose operators these are."""
        if self.other is not None:
            return str(self.other)
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
