"""Places of parameters in one flat buffer, and the slice of it that each shard owns."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

ALIGNMENT = 64  # elements: 128 bytes of a 16-bit dtype, 256 of float32
PIECE = 8192  # elements that one program of a kernel updates


class Segment(NamedTuple):
    """The part of one parameter that one shard owns, with the padding after it.

    Attributes:
        parameter: Position of the parameter in the buffer.
        start: First element, counted in the shard.
        length: Elements, a multiple of ``ALIGNMENT``. Elements of the padding are zero.
    """

    parameter: int
    start: int
    length: int


class Layout:
    """Places of parameters of one dtype in a flat buffer that ``shards`` ranks divide equally.

    Every parameter begins at a multiple of ``ALIGNMENT``. The places do not depend on the number
    of shards; only the padding at the end does.

    Args:
        counts: Elements per parameter, of one or more parameters.
        shards: Number of ranks that divide the buffer.
    """

    def __init__(self, counts: Sequence[int], shards: int) -> None:
        self.counts, self.shards = tuple(counts), shards
        ends = [*accumulate(_rounded(count, ALIGNMENT) for count in self.counts)]
        self.starts = (0, *ends[:-1])
        self.numel = _rounded(max(1, *ends), ALIGNMENT * shards)  # no shard is empty
        self.shard_numel = self.numel // shards

    def shard(self, rank: int) -> slice:
        """Return the elements that position ``rank`` owns."""
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def segments(self, rank: int) -> list[Segment]:
        """Return the parameters' parts in the shard of position ``rank``, in their order."""
        span = self.shard(rank)
        segments = []
        for parameter, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            first = max(start, span.start)
            end = min(start + _rounded(count, ALIGNMENT), span.stop)
            if first < end:
                segments.append(Segment(parameter, first - span.start, end - first))
        return segments


def pieces(segments: Sequence[Segment]) -> list[Segment]:
    """Return ``segments`` in pieces of at most ``PIECE`` elements, one per program of a kernel."""
    return [
        Segment(parameter, start + first, min(PIECE, length - first))
        for parameter, start, length in segments
        for first in range(0, length, PIECE)
    ]


def _rounded(count: int, multiple: int) -> int:
    """Return ``count``, rounded up to a multiple."""
    return -(-count // multiple) * multiple
