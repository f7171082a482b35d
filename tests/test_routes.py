"""Routes of rows on their way to the experts and back: order of the peers, and places."""

from typing import Any

import numpy as np
import pytest

from commlib.p2p.routes import routes

SIZE, EXPERTS = 4, 3


def drawn() -> Any:
    """Return counts of rows by sender, receiver and expert, all of them above 0."""
    return np.random.default_rng(5).integers(1, 9, (SIZE, SIZE, EXPERTS))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("rank", range(SIZE))
def test_each_rank_starts_with_the_next_one(rank: int, back: bool) -> None:
    """No two ranks then send to one peer at a time, and a rank's own rows come last."""
    plan = routes(drawn(), rank, back=back)

    peers = [(rank + 1 + step) % SIZE for step in range(SIZE)] * EXPERTS
    assert plan.sends["peer"].tolist() == peers
    assert plan.takes["peer"].tolist() == peers


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("rank", range(SIZE))
def test_places_count_the_rows_of_other_ranks(rank: int, back: bool) -> None:
    """The rows from other ranks follow each other without a gap, by their target."""
    takes = routes(drawn(), rank, back=back).takes
    others = np.sort(takes[takes["peer"] != rank], order="target")

    assert others["place"].tolist() == (np.cumsum(others["rows"]) - others["rows"]).tolist()


@pytest.mark.parametrize("back", [False, True])
def test_both_sides_know_the_same_places(back: bool) -> None:
    every = [routes(drawn(), rank, back=back) for rank in range(SIZE)]
    for sender in range(SIZE):
        for receiver in set(range(SIZE)) - {sender}:
            sends, takes = every[sender].sends, every[receiver].takes
            sent, taken = sends[sends["peer"] == receiver], takes[takes["peer"] == sender]
            for name in ("start", "target", "place", "rows", "slot"):
                assert sent[name].tolist() == taken[name].tolist()
