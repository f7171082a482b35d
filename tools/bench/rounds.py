"""Interleaved rounds: every peer once a round, so that a noisy machine slows all of them alike."""

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

Samples = Mapping[str, Sequence[float]]  # peer -> one value a round

WARM_ROUNDS = 2
LOWEST, HIGHEST = 10, 90  # percentiles of every spread that is shown


class Spread(NamedTuple):
    """A value, and what a tenth of the rounds stayed below and a tenth passed."""

    middle: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return median, p10 and p90 of one value a round."""
    low, middle, high = np.percentile(values, (LOWEST, 50, HIGHEST))
    return Spread(float(middle), float(low), float(high))


def ratio(values: Sequence[float], base: Sequence[float]) -> Spread:
    """Return the ratio of the medians, with p10 and p90 of the ratios of the single rounds."""
    rounds = spread(np.divide(values, base).tolist())
    return rounds._replace(middle=spread(values).middle / spread(base).middle)


def race(
    peers: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int,
    settle: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Return each peer's median seconds a call, one value a round.

    A peer's turn is one call that is not timed, then ``calls`` back to back without garbage
    collection; ``settle`` runs before and after them. Ranks take the same turns.
    """
    return interleave(meters(peers, calls=calls, settle=settle), rounds=rounds)


def meters(
    peers: Mapping[str, Callable[[], object]],
    *,
    calls: int,
    settle: Callable[[], object] | None = None,
) -> dict[str, Callable[[], float]]:
    """Return for each peer what takes one turn of a race and returns its value."""
    waits = settle or _nothing
    return {name: partial(_turn, call, calls, waits) for name, call in peers.items()}


def interleave(meters: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """Return what the meter of each peer says, one value a round; the first rounds are left out."""
    samples: dict[str, list[float]] = {name: [] for name in meters}
    gc.collect()
    gc.freeze()  # else each collection walks all of torch
    for number in range(-WARM_ROUNDS, rounds):
        for name in turns(list(meters), number):
            value = meters[name]()
            if number >= 0:
                samples[name].append(value)
    gc.unfreeze()
    return samples


def turns(names: Sequence[str], number: int) -> list[str]:
    """Return the order of round ``number``: another peer begins, and direction alternates."""
    first = number // 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if number % 2 else order


def _turn(call: Callable[[], object], calls: int, settle: Callable[[], object]) -> float:
    gc.collect()
    call()
    settle()
    gc.disable()
    try:
        stamps = [perf_counter_ns()]
        for _ in range(calls):
            call()
            stamps.append(perf_counter_ns())
    finally:
        gc.enable()
    settle()
    return float(np.median([after - before for before, after in pairwise(stamps)])) / 1e9


def _nothing() -> None:
    """CPU calls have finished when they return."""
