"""FLAGS_comm_check=1 on a CPU: calls that differ are errors before gloo ends the process."""

import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.compat.c10d import group_rings
from commlib.core.calls import order as call_order
from commlib.errors import MismatchError, RingError
from commlib.rendezvous.call_board import ROW, CallBoard
from commlib.rendezvous.hosts import HostExchange
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on
from tests.support.torch_groups import initialised, store_of
from tests.test_comm_check import ASYNC, CHECK, ones, ring_of, works

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
        with raises(RingError, "can't be used"):
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
        with raises(MismatchError, "detected mismatch", "all_reduce float32 [8]", "float32 [4]"):
            ring.all_reduce(ones(8 if comm.rank == 2 else 4))
        comm.barrier()


@runs_on("four_ranks")
def test_ranks_that_are_not_neighbours_notice(comm: Any) -> None:
    """Every process lives on: a closed connection must not be what ends the wait of rank 2."""
    with ring_of(comm, 1, timeout=40) as ring:
        works(ring, "nothing")
        began = time.monotonic()
        with raises(MismatchError, "all_reduce float32 [9]", "all_reduce float32 [4]"):
            ring.all_reduce(ones(9 if comm.rank == 0 else 4))
        assert_equal(time.monotonic() - began < 20, True, "seconds")
        comm.barrier()


@runs_on("cpu_ranks")
def test_every_pending_work_raises(comm: Any) -> None:
    with ring_of(comm, 1, timeout=40) as ring:
        works(ring, "nothing")
        began = time.monotonic()
        if comm.rank == 0:
            pending = [ring.all_reduce(ones(size), **ASYNC) for size in (4, 5)]
            comm.barrier()  # if rank 1 called first, the launch would raise
            for work in pending:
                with raises(MismatchError, "all_reduce float32 [4]", "all_reduce float32 [7]"):
                    work.wait()
        else:
            comm.barrier()
            time.sleep(0.3)  # the other one waits
            with raises(MismatchError, "detected mismatch"):
                ring.all_reduce(ones(7))
        assert_equal(time.monotonic() - began < 20, True, "seconds")
        comm.barrier()


@pytest.mark.parametrize("main", [True, False])
@runs_on("cpu_ranks")
def test_a_wait_for_a_message(comm: Any, main: bool) -> None:
    """The member that would send has left: its call differs from one that is pending here."""
    with ring_of(comm, 1, timeout=40) as ring:
        works(ring, "nothing")
        began = time.monotonic()
        if comm.rank == 0:
            work = ring.all_reduce(ones(4), **ASYNC)
            comm.barrier()  # if rank 1 called first, the launch would raise
            with ThreadPoolExecutor() as threads:
                receive = partial(ring.recv, ones(2), peer=1)
                with raises(MismatchError, "detected mismatch"):
                    receive() if main else threads.submit(receive).result()
            with raises(MismatchError, "detected mismatch"):
                work.wait()
        else:
            comm.barrier()
            time.sleep(0.3)  # the other one waits
            with raises(MismatchError, "detected mismatch"):
                ring.all_reduce(ones(7))
        assert_equal(time.monotonic() - began < 20, True, "seconds")
        comm.barrier()


@runs_on("cpu_ranks")
def test_a_signal_ends_the_error(comm: Any) -> None:
    """The ring has failed anyway: gloo would pair the next call with a different one."""
    with ring_of(comm, 1, timeout=5) as ring:
        works(ring, "nothing")
        if comm.rank == 0:
            work = ring.all_reduce(ones(4), **ASYNC)
            comm.barrier()
            with raises(MismatchError, "detected mismatch"):
                work.wait()
        else:
            comm.barrier()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ring._reports, "verdict", _interrupt)
                with raises(KeyboardInterrupt):
                    ring.all_reduce(ones(5))
            with raises(RingError, "can't be used"):
                ring.all_reduce(ones(4))
        comm.barrier()


def _interrupt(*_: object) -> str:
    raise KeyboardInterrupt


@pytest.mark.parametrize("level", [0, 1, 2])
@runs_on("cpu_ranks")
def test_a_group_after_its_end(comm: Any, level: int) -> None:
    commlib.shutdown()
    with commlib.flags.override(CHECK, level), initialised(comm, "commlib"):
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(2), group=group)
        dist.destroy_process_group(group)
        for _ in range(2):
            with raises(RingError, "is closed"):
                group.allreduce([torch.ones(3)]).wait()
        x = torch.ones(3)
        dist.all_reduce(x)
        assert_equal(x.tolist(), [2.0] * 3, "the group of all ranks")


@pytest.mark.parametrize("first", [True, False])
@runs_on("cpu_ranks")
def test_splits_on_one_rank_alone(comm: Any, first: bool) -> None:
    """Torch allows them where they name equal parts."""
    with initialised(comm, "commlib"):
        splits = [2, 2] if (comm.rank == 0) is first else None
        out = torch.empty(4)
        dist.all_to_all_single(out, torch.arange(4.0) + 10 * comm.rank, splits, splits)
        at = 2.0 * comm.rank
        assert_equal(out.tolist(), [at, at + 1, at + 10, at + 11], "parts")


@runs_on("cpu_ranks")
def test_a_group_that_can_not_be_made_leaves_nothing(comm: Any) -> None:
    commlib.shutdown()
    store = store_of()

    def interrupt_connected(*_: object) -> None:
        """Interrupt both ranks once both have connected: one that ends before fails the other."""
        store.set(f"connected/{comm.rank}", "")
        store.wait(["connected/0", "connected/1"], timedelta(seconds=30))
        raise KeyboardInterrupt

    with initialised(comm, "commlib") as world, pytest.MonkeyPatch.context() as patch:
        ring: Any = commlib.ring_from_group(world)
        patch.setattr(call_order, "_shared", interrupt_connected)
        with raises(KeyboardInterrupt):
            dist.new_group([0, 1])
        assert_equal(ring._engine._apart, [], "connections")


def test_the_end_of_every_order() -> None:
    ended = []

    class Order:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            ended.append(self.name)
            if self.name == "one":
                raise RuntimeError("no end of one")

    orders: Any = {"cuda": Order("one"), "cpu": Order("two")}
    with raises(RuntimeError, "no end of one"):
        group_rings.release({}, orders)
    assert_equal(ended, ["one", "two"], "orders")


def test_messages_are_counted_by_order() -> None:
    """The address of a group that has ended may be that of a later one, on one rank alone."""
    health: Any = SimpleNamespace(fault=None)
    identity: Any = None
    hosts, group = HostExchange(identity, None, health), object()
    numbers = [hosts.pair(1, True, group, name)[1] for name in ("one", "one", "two")]
    assert_equal(numbers, [0, 1, 0], "numbers")


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


class Posting:
    """A neighbour's row; at a read this rank posts, as another of its threads may."""

    def __init__(self, row: Any, board: CallBoard, calls: list[int]) -> None:
        self.row, self.board, self.calls = row, board, calls

    def __getitem__(self, place: int) -> int:
        word: int = self.row[place]
        if self.calls:
            calls, self.calls = self.calls, []
            for call in calls:
                self.board.post(call)
        return word


def test_a_post_during_a_look_is_not_a_difference() -> None:
    one, two = boards()
    near: Any = one
    for number in range(20):
        one.post(number)
        two.post(number)
    (at, row), calls = one._near[0], list(range(20, 20 + 1024))
    near._near = [(at, Posting(row, one, calls))]
    assert_equal((one.difference(), one._number), (None, 1044))
    one._near = []
    one.close()
    two.close()


class Counting:
    """A neighbour's row that counts the reads."""

    def __init__(self, row: Any) -> None:
        self.row, self.reads = row, 0

    def __getitem__(self, place: int) -> int:
        self.reads += 1
        return int(self.row[place])


def test_a_look_compares_new_calls_alone() -> None:
    one, two = boards()
    for number in range(900):
        one.post(number)
        two.post(number)
    near: Any = one
    counting = Counting(one._near[0][1])
    near._near = [(1, counting)]
    reads = []
    for number in range(3):
        one.difference()
        reads.append(counting.reads)
        one.post(number)
        two.post(number)
        counting.reads = 0
    assert_equal(reads, [900, 1, 1], "reads of three looks")
    assert_equal(one.post(7), None)
    assert_equal((two.post(8), one.difference()), (0, 1), "a difference after them")
    one.close()
    two.close()


def test_a_post_on_a_board_that_another_thread_closes() -> None:
    one, two = boards()

    def close(_: object) -> int:
        one.close()
        return 1

    one.code_of = close
    assert_equal((one.post(1), one.post(1), one.difference(), one.marked()), (None,) * 4)
    two.close()


def test_a_mark_reaches_every_member() -> None:
    memory = mmap.mmap(-1, 4 * ROW)
    made = [CallBoard(memory, 0, rank, 4) for rank in range(4)]
    for board in made:
        board.code_of = int
    assert_equal([board.marked() for board in made], [None] * 4)
    made[3].mark(3, 0)
    assert_equal([board.marked() for board in made], [(3, 0)] * 4)
    assert_equal([board.post(1) for board in made], [3] * 4)
    for board in made:
        board.close()
