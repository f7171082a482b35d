"""FLAGS_comm_check=1 on a CPU: calls that differ are errors before gloo ends the process."""

import mmap
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.errors import MismatchError
from commlib.rendezvous.call_board import ROW, CallBoard
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on
from tests.support.torch_groups import initialised
from tests.test_comm_check import ASYNC, ones, ring_of, works

Step = Callable[[Any], Any]
DIFFERENT: dict[str, tuple[Step, Step]] = {
    "size": (lambda r: r.all_reduce(ones(4)), lambda r: r.all_reduce(ones(8))),
    "dtype": (lambda r: r.all_reduce(ones(4)), lambda r: r.all_reduce(ones(4).double())),
    "mean": (
        lambda r: r.all_reduce(ones(4), op="avg"),
        lambda r: r.all_reduce(ones(5), op="avg"),
    ),
    "root": (
        lambda r: r.broadcast(ones(4), ones(4), root=0),
        lambda r: r.broadcast(ones(4), ones(4), root=1),
    ),
    "operator": (lambda r: r.all_gather(ones(8), ones(4)), lambda r: r.all_reduce(ones(4))),
    "asynchronous": (
        lambda r: r.all_reduce(ones(4), **ASYNC).wait(),
        lambda r: r.all_reduce(ones(9), **ASYNC).wait(),
    ),
}


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("name", DIFFERENT)
@runs_on("cpu_ranks")
def test_calls_that_differ(comm: Any, name: str, late: int) -> None:
    with ring_of(comm, 1, timeout=20) as ring:
        works(ring, "nothing")
        if comm.rank == late:
            time.sleep(0.15)  # the other one is in gloo
        with raises(MismatchError, "detected mismatch", " here and ", "close_ring(60)"):
            DIFFERENT[name][comm.rank](ring)
        with raises(commlib.errors.RingError, "can't be used"):
            ring.barrier()
        comm.barrier()


@runs_on("cpu_ranks")
def test_in_a_second_group(comm: Any) -> None:
    commlib.shutdown()
    with initialised(comm, "commlib"):
        group = dist.new_group([0, 1])
        x = torch.ones(3 + comm.rank)
        with raises(MismatchError, "in group"):
            dist.all_reduce(x, group=group)


@runs_on("three_ranks")
def test_a_neighbour_notices(comm: Any) -> None:
    with ring_of(comm, 1, timeout=20) as ring:
        works(ring, "nothing")
        with raises(MismatchError, "detected mismatch"):
            ring.all_reduce(ones(8 if comm.rank == 2 else 4))
        comm.barrier()


def boards() -> list[CallBoard]:
    memory = mmap.mmap(-1, 16 + 2 * ROW)
    made = [CallBoard(memory, 16, rank, 2) for rank in range(2)]
    for board in made:
        board.code_of = int
    return made


def test_a_rank_that_is_far_ahead_is_not_compared() -> None:
    one, two = boards()
    for number in range(3000):
        assert one.post(number) is None
    for number in range(3000):
        assert two.post(number) is None
    assert_equal((one.difference(), two.difference()), (None, None))
    one.post(1)
    assert_equal((two.post(2), one.difference(), two.difference()), (0, 1, 0))
    for board in (one, two):
        board.close()
