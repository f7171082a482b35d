"""Routes of rows: which rank sends which rows, and their places on both sides."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

# Rows that are contiguous on both sides. ``start``: their first row in the sender's tensor;
# ``target``: in the receiver's output, where ``slot`` is their number; ``place``: how many of the
# rows before them there are from other ranks too; ``peer``: the other rank.
SEGMENT = np.dtype(
    [
        ("start", np.int64),
        ("target", np.int64),
        ("place", np.int64),
        ("rows", np.int64),
        ("peer", np.int32),
        ("slot", np.int32),
    ]
)
Array = np.ndarray[Any, Any]


class Routes(NamedTuple):
    """The segments that one rank sends and takes: arrays of SEGMENT.

    Segments between two ranks have the same order on both. ``most``: the most rows that any
    rank takes from others, the same number on all ranks.
    """

    sends: Array
    takes: Array
    most: int


def routes(counts: Array, rank: int, *, back: bool) -> Routes:
    """Return the routes of ``rank`` to the experts, or of the same rows on their way back.

    ``counts[a, b, k]`` rows go from rank a to rank b's expert k. The last few are kept: forward
    and backward ask for the same.
    """
    return _kept(counts.astype(np.int64).tobytes(), counts.shape, rank, back)


@lru_cache(maxsize=64)
def _kept(counts: bytes, shape: tuple[int, ...], rank: int, back: bool) -> Routes:
    direction: Callable[[Array, int], Routes] = _from_experts if back else _to_experts
    return direction(np.frombuffer(counts, np.int64).reshape(shape), rank)


def _to_experts(counts: Array, rank: int) -> Routes:
    """A sender holds its rows by receiver, then expert; a receiver gets them by expert, sender."""
    size = len(counts)
    a, _, k = _indices(counts)
    table = _table(counts, _held(counts), _sorted(counts), k * size + a)
    # The receiver's own rows: those of earlier experts, and of the same one if it is earlier.
    local_rows = counts[range(size), range(size)]
    passed = np.cumsum(local_rows, 1) - local_rows, local_rows
    table["place"] -= passed[0][None] + passed[1][None] * _above(size).T[..., None]
    return Routes(_ordered(table[rank], rank), _ordered(table[:, rank], rank), _most(counts, 0))


def _from_experts(counts: Array, rank: int) -> Routes:
    """The same table with the sides exchanged."""
    size = len(counts)
    _, b, k = _indices(counts)
    table = _table(counts, _sorted(counts), _held(counts), b * counts.shape[2] + k)
    local_rows = counts[range(size), range(size)].sum(1)
    table["place"] -= (local_rows[:, None] * _above(size))[..., None]
    return Routes(_ordered(table[:, rank], rank), _ordered(table[rank], rank), _most(counts, 1))


def _table(counts: Array, start: Array, target: Array, slot: Array) -> Array:
    table = np.zeros(counts.shape, SEGMENT)
    table["rows"], table["start"], table["slot"] = counts, start, slot
    table["target"] = table["place"] = target
    return table


def _indices(counts: Array) -> Any:
    """The sender, receiver and expert of each entry."""
    return np.indices(counts.shape, sparse=True)


def _held(counts: Array) -> Array:
    """The first row of each entry where the sender holds them."""
    flat = counts.reshape(len(counts), -1)
    return (np.cumsum(flat, 1) - flat).reshape(counts.shape)


def _sorted(counts: Array) -> Array:
    """The first row of each entry where the receiver's experts get them."""
    return _held(counts.transpose(1, 2, 0)).transpose(2, 0, 1)


def _above(size: int) -> Array:
    """[a, b]: whether b is the higher rank."""
    ranks = np.arange(size)
    return ranks[None, :] > ranks[:, None]


def _most(counts: Array, senders: int) -> int:
    """Return the most rows from others; axis ``senders`` of the table is their source."""
    size = len(counts)
    local_rows = counts[range(size), range(size)].sum(1)
    return int((counts.sum((senders, 2)) - local_rows).max())


def _ordered(segments: Array, rank: int) -> Array:
    """[peer, expert] -> one expert after another, each starting after this rank.

    All ranks then send to different peers at a time.
    """
    segments = segments.copy()
    segments["peer"] = np.arange(len(segments))[:, None]
    return np.roll(segments, -rank - 1, axis=0).T.reshape(-1)
