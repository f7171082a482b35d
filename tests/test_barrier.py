"""ops.barrier: no rank goes on before every rank has come."""

import time
from typing import Any

import torch

import commlib
from commlib import ops
from commlib.errors import ArgumentError, RingError
from tests.support.checks import assert_equal, raises, settle
from tests.support.operator import ABSENT_RING, MODES, calls, compile_whole
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

LATE_S = 0.1


def held(comm: Any) -> None:
    """Nobody leaves before the last has come, whichever it is, in every mode and compiled.

    The clock is the machine's, so that the times of several ranks compare.
    """
    ways = {name: lambda m=mode: ops.barrier(**m) for name, mode in MODES.items()}
    ways["compiled"] = compile_whole(lambda: ops.barrier())
    for name, wait_for_all in ways.items():
        for late in range(comm.size):
            if comm.rank == late:
                time.sleep(LATE_S)
            came = time.monotonic()
            _pass(comm, wait_for_all)
            left = time.monotonic()
            times = torch.tensor([came, -left], dtype=torch.float64, device=comm.device)
            last_came, first_left = ops.all_reduce(times, op="max").tolist()
            assert_equal(-first_left >= last_came, True, f"{name}, rank {late} late: held")


def _pass(comm: Any, wait_for_all: Any) -> None:
    result = wait_for_all()
    if isinstance(result, commlib.Work):
        assert_equal(result.wait(), None, "result of the Work")
    else:
        assert_equal(result, None, "result")
    settle(comm)


def test_holds(ranks: Ranks) -> None:
    ranks(held)


def test_holds_three(three_ranks: Ranks) -> None:
    three_ranks(held)


@runs_on("ranks")
def test_counted(comm: Any) -> None:
    """A barrier is a collective: refused ones launch nothing, compiled ones are not dropped."""
    before = calls(comm)
    with raises(RingError, ABSENT_RING):
        ops.barrier(ABSENT_RING)
    with raises(ArgumentError, "use_calc_stream=False"):
        ops.barrier(sync_op=False)
    assert_equal(calls(comm), before, "calls launched by refused ones")

    def three(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            ops.barrier()
        return x + 1

    compile_whole(three)(torch.zeros(2, device=comm.device))
    assert_equal(calls(comm) - before, 3, "barriers of a compiled function")
