"""CommContext.exchange: an all-gather of integers between the hosts' processes."""

import tempfile
from typing import Any

import pytest
import torch

import commlib
from commlib import graph, ops
from commlib.errors import ArgumentError, CommTimeout, EngineError, MismatchError, RingError
from commlib.rendezvous import shared_memory
from tests.support.checks import assert_equal, raises
from tests.support.operator import calls
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

EXTREMES = [0, -1, 2**63 - 1, -(2**63)]


def numbers(comm: Any) -> None:
    """Any lengths, also unequal ones, around the number of integers per message."""
    before = calls(comm)
    assert_equal(comm.exchange([]), [[]] * comm.size, "nothing")
    assert_equal(comm.exchange(EXTREMES), [EXTREMES] * comm.size, "the whole range of 64 bits")
    for longest in (1, 508, 509, 510, 1019, 1020, 5000):
        every = [list(range(rank, rank + longest - rank)) for rank in range(comm.size)]
        assert_equal(comm.exchange(every[comm.rank]), every, f"lengths from {longest} down")
    assert_equal(calls(comm), before, "no collective on the ring")
    ring = commlib.new_ring(40 + comm.rank, [comm.rank])
    assert ring is not None
    assert_equal(ring.exchange([comm.rank]), [[comm.rank]], "a ring of one")
    commlib.CommContextManager.instance().close(40 + comm.rank)


@runs_on("ranks")
def test_wrong_values(comm: Any) -> None:
    """Values that can't be sent are an error on their rank, and the ring stays usable."""
    ring, before = commlib.new_ring(45 + comm.rank, [comm.rank]), comm._errors()
    assert ring is not None
    wrong: list[Any] = [[2**63], [0, -(2**63) - 1], [1.5], ["a"], "12", b"12", 5, None, {1: 2}, {3}]
    if comm.rank == 1:
        for values in wrong:
            for one in (comm, ring):
                with raises(ArgumentError, f"exchange on ring {one.ring_id} (rank", "expected"):
                    one.exchange(values)
    assert_equal(comm.exchange([comm.rank]), [[0], [1]], "the next exchange")
    assert_equal(comm.exchange((True, torch.tensor(7))), [[1, 7]] * 2, "what counts as an int")
    assert_equal((comm.report()["state"], comm._errors()), ("ready", before), "the ring")
    commlib.CommContextManager.instance().close(45 + comm.rank)


@runs_on("ranks")
def test_a_capture_of_one_rank(comm: Any) -> None:
    """An exchange of the program does not answer one that commlib makes for a call."""

    @graph.capture
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return ops.all_reduce(x) * 2

    x = torch.ones(4, device=comm.device)
    words = "detected mismatch", "exchange of the program"
    with raises(MismatchError, *words):
        if comm.rank:
            comm.all_reduce(torch.empty_like(x), x)
            comm.exchange([])
        else:
            doubled(x)
    assert_equal(comm.exchange([comm.rank]), [[0], [1]], "the next exchange")


def test_numbers(ranks: Ranks) -> None:
    ranks(numbers)


def test_numbers_of_three(three_ranks: Ranks) -> None:
    three_ranks(numbers)


@runs_on("ranks")
def test_after_close(comm: Any) -> None:
    ring = commlib.new_ring(41, [0, 1])
    assert ring is not None
    ring.exchange([1])
    commlib.CommContextManager.instance().close(41)
    with raises(RingError, "exchange on ring 41", "closed"):
        ring.exchange([1])
    again = commlib.new_ring(41, [1, 0])
    assert again is not None
    assert_equal(again.exchange([comm.rank]), [[1], [0]], "order of the ring")
    commlib.CommContextManager.instance().close(41)


@runs_on("ranks")
def test_a_missing_rank(comm: Any) -> None:
    """A missing rank is an error within the ring's timeout, and the ring has failed."""
    ring = commlib.new_ring(42, [0, 1], timeout=5)
    assert ring is not None
    if comm.rank == 0:
        with raises((CommTimeout, EngineError), "exchange on ring 42 (rank 0 of 2"):
            ring.exchange([1])
        with raises(RingError, "failed in exchange"):
            ring.exchange([1])
    comm.exchange([])
    commlib.CommContextManager.instance().close(42)


@runs_on("all_gpu_ranks")
def test_during_a_capture(comm: Any) -> None:
    """A capture on this thread continues: an exchange uses no stream."""
    x, graph = torch.zeros(1, device=comm.device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x += comm.exchange([1, comm.rank])[1][1]
    graph.replay()
    assert_equal(x.item(), 1.0, "the number of rank 1")


@runs_on("ranks")
def test_without_shared_memory(comm: Any) -> None:
    """If one rank can't share memory, all ranks use gloo."""
    from commlib.rendezvous import shared_memory

    for whose in (0, 1):
        folder = shared_memory._FOLDER
        if comm.rank == whose:
            shared_memory._FOLDER = folder / "absent"
        ring = commlib.new_ring(43, [0, 1])
        assert ring is not None
        for longest in (3, 600):
            every = [list(range(rank, longest)) for rank in range(2)]
            assert_equal(
                ring.exchange(every[comm.rank]), every, f"without shared memory on rank {whose}"
            )
        assert_equal(ring._hosts._shared_memory, None, "the shared memory")
        shared_memory._FOLDER = folder
        commlib.CommContextManager.instance().close(43)


@runs_on("ranks")
def test_a_rank_that_has_closed_the_ring(comm: Any) -> None:
    """A rank that has closed the ring is named at once, long before the deadline."""
    ring = commlib.new_ring(44, [0, 1], timeout=60)
    assert ring is not None
    ring.exchange([])
    if comm.rank == 1:
        commlib.CommContextManager.instance().close(44)
    else:
        with raises(EngineError, "exchange on ring 44", "positions [1]"):
            ring.exchange([1])
    comm.exchange([])
    commlib.CommContextManager.instance().close(44)


def test_a_rank_that_writes_and_closes_during_a_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(shared_memory._length(2))
        mine, other = (
            shared_memory.SharedMemoryAllGather(file.fileno(), rank, 2, 5) for rank in range(2)
        )

        def closed_just_now(_: int, rank: int) -> bool:
            assert_equal(
                other([7]), [[3], [7]], f"the numbers that rank {rank} gets before it closes"
            )
            return False

        monkeypatch.setattr(shared_memory, "_held", closed_just_now)
        assert_equal(mine([3]), [[3], [7]], "the numbers")
