"""The orders of the known schedules: GPipe, 1F1B, and interleaved with virtual stages."""

from itertools import pairwise

from commlib.errors import GraphError
from commlib.graph.pipelines.actions import Action


def orders_of(ranks: int, microbatches: int, chunks: int, most: int | None) -> list[list[Action]]:
    """Return the orders of ranks that prefer backwards; ``most``: forwards that run before any."""
    for name, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise GraphError(f"{name}={value!r}: expected a whole number, 1 or more")
    return [_order(rank, ranks, microbatches, chunks, most) for rank in range(ranks)]


def _order(rank: int, ranks: int, microbatches: int, chunks: int, most: int | None) -> list[Action]:
    """Return the order of one rank: forwards to fill the pipeline, then one by one, then backwards.

    Microbatches pass through the chunks in groups of at least ``ranks``: so many forwards later the
    first of them comes back to this rank.
    """
    count = max(1, microbatches // ranks)
    ends = [microbatches * (i + 1) // count for i in range(count)]
    groups = [range(start, stop) for start, stop in pairwise([0, *ends])]
    stages = range(rank, ranks * chunks, ranks)
    forwards = [Action("forward", s, m) for group in groups for s in stages for m in group]
    backwards = [
        Action("backward", s, m) for group in groups for s in reversed(stages) for m in group
    ]
    if most is None:
        ahead, longest = ranks - rank - 1, max(map(len, groups))
        most = ahead if chunks == 1 else 2 * ahead + (chunks - 1) * longest
    actions, most = forwards[:most], min(most, len(forwards))
    for forward, backward in zip(forwards[most:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - most :]
