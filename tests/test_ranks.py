"""The harness itself: what it shows of a failure, and that it recovers from one."""

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks, fresh
from tests.support.runs_on import runs_on


def nothing(comm: Any) -> None:
    """Succeed."""


def wrong_on(comm: Any, *bad: int) -> None:
    if comm.rank in bad:
        raise ValueError(f"wrong on {comm.rank}")


def stuck_on(comm: Any, *bad: int) -> None:
    if comm.rank in bad:
        time.sleep(60)


def wrong_while_the_other_is_in_a_collective(comm: Any) -> None:
    wrong_on(comm, 1)
    comm.barrier()


def dead_on(comm: Any, bad: int) -> None:
    if comm.rank == bad:
        os._exit(3)


def out_of_step(comm: Any) -> None:
    """Rank 0 makes a call that its peer does not make: no error here, yet a broken pair."""
    if comm.rank == 0:
        comm.all_reduce(torch.zeros(4), torch.zeros(4), use_calc_stream=False, sync_op=False)


def remember(comm: Any, pids: list[int]) -> None:
    if os.getpid() not in pids:
        raise AssertionError(f"pid {os.getpid()} is none of {pids}")


def loaded(comm: Any) -> None:
    assert "tests.support.loaded" in sys.modules
    assert gc.get_freeze_count() > 100_000


def test_ranks_are_loaded_before_they_start() -> None:
    """A preload that fails is silent, and each rank then loads torch and its compiler itself."""
    with fresh(1) as ranks:  # a benchmark on shared ranks ends the freeze
        ranks(loaded)


def report_of(ranks: Ranks, fn: Callable[..., None], *args: object, deadline: float = 60) -> str:
    """Return what pytest shows of a failing ``fn``."""
    with pytest.raises(pytest.fail.Exception) as caught:
        ranks(fn, *args, deadline=deadline)
    assert not ranks.alive()
    return str(caught.value)


def test_pair_stays_up(ranks: Ranks) -> None:
    ranks(nothing)
    pids = [member.process.pid for member in ranks.members]

    ranks(remember, pids)


def test_every_traceback_is_shown_and_a_fresh_pair_follows() -> None:
    with fresh(2) as ranks:
        both = report_of(ranks, wrong_on, 0, 1)
        assert "ValueError: wrong on 0" in both
        assert "ValueError: wrong on 1" in both
        assert both.count("test_ranks.py") == 2, "a traceback each"

        one = report_of(ranks, wrong_while_the_other_is_in_a_collective)
        assert "ValueError: wrong on 1" in one
        assert "in wrong_while_the_other_is_in_a_collective" in one.split("rank 1")[0], one

        assert "died with exit code 3" in report_of(ranks, dead_on, 1)
        ranks(nothing)


def test_deadline_names_who_is_late_and_where() -> None:
    with fresh(2) as ranks:
        ranks(nothing)
        begin = time.monotonic()
        late = report_of(ranks, stuck_on, 1, deadline=2).split("rank 1")[1]

        assert time.monotonic() - begin < 25
        assert "still inside after 2 s" in late
        assert "in stuck_on" in late


def test_ranks_out_of_step_fail_the_test_that_left_them_so() -> None:
    with fresh(2) as ranks:
        assert "detected mismatch" in report_of(ranks, out_of_step)


def test_a_function_that_cannot_travel_breaks_nothing(ranks: Ranks) -> None:
    ranks(nothing)
    with pytest.raises(Exception, match="pickle"):
        ranks(lambda comm: None)

    ranks(nothing)


@pytest.mark.parametrize("letter", ["a", "b"])
@runs_on("ranks")
def test_a_test_on_ranks_has_fixtures_and_parameters(
    comm: Any, letter: str, tmp_path: Path
) -> None:
    path = tmp_path / letter
    path.touch()
    comm.barrier()
    if comm.size != 2 or os.listdir(tmp_path) != [letter]:
        raise AssertionError(f"{comm.size} ranks, {os.listdir(tmp_path)}")


@runs_on("pair")
def wrong_body(comm: Any, text: str) -> None:
    raise ValueError(f"{text} {comm.rank}")


def test_a_test_on_ranks_fails_with_each_traceback() -> None:
    with fresh(2) as pair, pytest.raises(pytest.fail.Exception) as caught:
        wrong_body(pair=pair, text="wrong on")
    assert "ValueError: wrong on 0" in str(caught.value)
    assert "ValueError: wrong on 1" in str(caught.value)
