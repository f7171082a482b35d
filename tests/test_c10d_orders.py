"""Groups over the same ranks: each has its own order of calls, as torch's groups have."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import commlib
from commlib.compat.c10d import group_rings
from commlib.compat.c10d.bridges import calls_of
from commlib.errors import CommError, CommTimeout, EngineError, MismatchError, RingError
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, initialised


def crossed(ring: Any, one: Any, two: Any) -> list[list[float]]:
    """Return sums of two groups whose asynchronous calls have another order on each rank."""
    a, b = (torch.full((2,), base + ring.rank, device=ring.device) for base in (5.0, 10.0))
    calls = [(a, one), (b, two)]
    calls = calls if ring.rank == 0 else calls[::-1]
    works: list[Any] = [dist.all_reduce(x, group=group, async_op=True) for x, group in calls]
    for work in works:
        work.wait()
    return [a.tolist(), b.tolist()]


@runs_on("cpu_ranks")
def test_two_groups_in_another_order_on_each_rank(ring: Any) -> None:
    with initialised(ring, "commlib") as world:
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        assert_equal(commlib.ring_from_group(two) is ring, True, "one ring")
        calls = ring.report()["calls"]
        for groups in ((one, two), (world, two), (one, world)):
            assert_equal(crossed(ring, *groups), [[11.0] * 2, [21.0] * 2], "sums")
        assert_equal(ring.report()["calls"], calls + 6, "calls of the ring")
        dist.destroy_process_group(one)
        assert_equal(crossed(ring, world, two), [[11.0] * 2, [21.0] * 2], "after one has ended")
    assert_equal(ring.report()["errors"], [], "errors")
    ring.barrier()


@runs_on("cpu_ranks")
def test_messages_of_two_groups(ring: Any) -> None:
    """A receive takes what was sent in its own group."""
    with initialised(ring, "commlib"):
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        if ring.rank == 0:
            sent: list[Any] = [
                dist.isend(torch.full((1,), 1.0 + at), 1, g) for at, g in enumerate(groups)
            ]
            for work in sent:
                work.wait()
        else:
            got = [torch.zeros(1), torch.zeros(1)]
            for at in (1, 0):
                dist.recv(got[at], 0, groups[at])
            assert_equal([x.item() for x in got], [1.0, 2.0], "messages")
        dist.barrier(groups[0])


@runs_on("cpu_ranks")
def test_every_call_in_a_second_group(ring: Any) -> None:
    with initialised(ring, "commlib"):
        group = dist.new_group([0, 1])
        x = torch.arange(4.0) + ring.rank
        outs = [torch.empty(4), torch.empty(4)]
        dist.all_gather(outs, x, group)
        assert_equal([out[0].item() for out in outs], [0.0, 1.0], "all_gather")
        half = torch.empty(2)
        dist.reduce_scatter_tensor(half, x, group=group)
        assert_equal(half.tolist(), [[1.0, 3.0], [5.0, 7.0]][ring.rank], "reduce_scatter")
        dist.all_to_all_single(x, x.clone(), group=group)
        dist.broadcast(x, 0, group)
        assert_equal(x.tolist(), [0.0, 1.0, 1.0, 2.0], "all_to_all, broadcast")
        with distributed_c10d._coalescing_manager(group):
            dist.all_reduce(x, group=group)
            dist.all_reduce(half, group=group)
        assert_equal(half.tolist(), [6.0, 10.0], "coalesced")
        peer = 1 - ring.rank
        taken = torch.empty(2)
        operations = [
            dist.P2POp(dist.isend, half + ring.rank, peer, group),
            dist.P2POp(dist.irecv, taken, peer, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert_equal(taken.tolist(), [6.0 + peer, 10.0 + peer], "batch")
        dist.barrier(group)


@runs_on("ranks")
def test_an_order_that_differs_is_found_at_level_2(ring: Any) -> None:
    """All ranks raise before a launch, and the text names the groups."""
    commlib.shutdown()
    with commlib.flags.override("FLAGS_comm_check", 2), initialised(ring, OURS[ring.device.type]):
        one, two = dist.new_group([0, 1], group_desc="one"), dist.new_group([0, 1])
        names = [distributed_c10d._world.pg_names[group] for group in (one, two)]
        x = torch.ones(2, device=ring.device)
        with raises(MismatchError, *(f"in group '{name}'" for name in names)):
            dist.all_reduce(x, group=(one, two)[ring.rank])
        dist.all_reduce(x, group=two)
        assert_equal(x.tolist(), [2.0, 2.0], "after the error")


@runs_on("cpu_ranks")
def test_members_that_do_not_make_the_group(ring: Any) -> None:
    with initialised(ring, "commlib") as world:
        calls: Any = calls_of(world)
        if ring.rank == 0:
            with raises(CommTimeout, "creating group 'late'", "waiting for ranks [1]"):
                group_rings.make_orders(dict(calls.rings), "late", timedelta(seconds=0.5))
        dist.barrier()


@runs_on("cpu_ranks")
def test_an_aborted_group_ends_alone(ring: Any) -> None:
    """Calls that it waits for end at once; the group of all ranks and a third group go on."""
    commlib.shutdown()
    with initialised(ring, "commlib"):
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        aborted: Any = calls_of(one)
        x = torch.ones(2)
        for group in (None, one, two):
            dist.all_reduce(x, group=group)
        dist.barrier()
        begun, errors = time.monotonic(), []

        def wait() -> None:
            try:  # torch's function would look the group up for its log, where it is no more
                aborted.allreduce([x]).wait()
            except Exception as error:
                errors.append(error)

        waiter = threading.Thread(target=wait)
        if ring.rank == 0:  # rank 1 makes no such call: only the abort ends that of rank 0
            waiter.start()
            time.sleep(0.5)
            distributed_c10d._abort_process_group(one)
            waiter.join(20)
            assert_equal([type(error) for error in errors], [EngineError], "errors")
            assert_equal("'1' was aborted; make" in str(errors[0]), True, str(errors[0]))
        dist.barrier()  # over the group of all ranks
        if ring.rank:
            distributed_c10d._abort_process_group(one)
        assert_equal(time.monotonic() - begun < 15, True, "ended before the deadline")
        with raises(RingError, "was aborted", "call new_group on every member"):
            aborted.allreduce([x])
        for group in (None, two, dist.new_group([0, 1])):
            x = torch.ones(2)
            dist.all_reduce(x, group=group)
            assert_equal(x.tolist(), [2.0, 2.0], "after the abort")
        assert_equal(commlib.comm(0).report()["errors"], [], "errors of the ring")


@runs_on("cpu_ranks")
def test_an_aborted_group_ends_alone_at_level_2(ring: Any) -> None:
    """So does a receive whose header no rank has answered, on both ranks."""
    commlib.shutdown()
    with commlib.flags.override("FLAGS_comm_check", 2), initialised(ring, "commlib"):
        group: Any = dist.new_group([0, 1])
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        work: Any = dist.irecv(x, 1 - ring.rank, group=group)
        dist.barrier()
        begun = time.monotonic()
        if ring.rank == 0:
            distributed_c10d._abort_process_group(group)
        with raises(EngineError, "recv on ring 0", "group '1' was ", "call new_group"):
            work.wait()
        assert_equal(time.monotonic() - begun < 15, True, "ended before the deadline")
        dist.barrier()
        if ring.rank:
            distributed_c10d._abort_process_group(group)
        x = torch.ones(2)
        dist.all_reduce(x)
        assert_equal(x.tolist(), [2.0, 2.0], "the group of all ranks")
        assert_equal(commlib.comm(0).report()["errors"], [], "errors of the ring")


@runs_on("cpu_ranks")
def test_a_group_that_another_rank_aborts(ring: Any) -> None:
    """Its calls end with an error on the other ranks too, and no other group ends."""
    commlib.shutdown()
    with initialised(ring, "commlib"):
        group: Any = dist.new_group([0, 1])
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        dist.barrier()
        if ring.rank == 0:
            distributed_c10d._abort_process_group(group)
        else:
            for _ in range(2):  # under way, and later
                with raises(CommError, "all_reduce on ring 0", "was ended by rank 0"):
                    dist.all_reduce(x, group=group)
            distributed_c10d._abort_process_group(group)
        x = torch.ones(2)
        dist.all_reduce(x)
        assert_equal(x.tolist(), [2.0, 2.0], "the group of all ranks")


@runs_on("four_ranks")
def test_an_aborted_group_of_four(ring: Any) -> None:
    """Rank 2 has a connection in use to ranks 1 and 3 alone, whose calls the abort ends first."""
    commlib.shutdown()
    with initialised(ring, "commlib"):
        group: Any = dist.new_group(range(4))
        x = torch.ones(1000)
        dist.all_reduce(x, group=group)
        dist.barrier()
        begun = time.monotonic()
        if ring.rank == 0:
            time.sleep(0.5)  # the others wait by then
            distributed_c10d._abort_process_group(group)
        else:
            with raises(EngineError, "was ended by one of the ranks", "call new_group"):
                dist.all_reduce(x, group=group)
        assert_equal(time.monotonic() - begun < 15, True, "ended before the deadline")
        x = torch.ones(2)
        dist.all_reduce(x)
        assert_equal(x.tolist(), [4.0, 4.0], "the group of all ranks")


@runs_on("four_ranks")
def test_a_group_that_times_out_ends_alone(ring: Any) -> None:
    """The first member that gives up ends the others' calls; every other group goes on."""
    commlib.shutdown()
    with initialised(ring, "commlib") as world:
        other, group = dist.new_group(range(4)), dist.new_group(range(4), timedelta(seconds=1))
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        if ring.rank == 0:
            dist.barrier(other)  # after the deadline of the others
        for _ in range(2):
            with raises(CommError, "all_reduce on ring 0", "call new_group on every member"):
                dist.all_reduce(x, group=group)
        if ring.rank:
            dist.barrier(other)
        dist.destroy_process_group(group)
        for one in (world, other, dist.new_group(range(4))):
            x = torch.ones(2)
            dist.all_reduce(x, group=one)
            assert_equal(x.tolist(), [4.0, 4.0], "after the timeout")


TIMED_OUT: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "all_reduce": lambda x, group: dist.all_reduce(x, group=group),
    "broadcast": lambda x, group: waited(dist.broadcast(x, 1, group, async_op=True)),
    "recv": lambda x, group: dist.recv(x, 1, group),
}


@runs_on("cpu_ranks")
def test_the_error_of_a_group_that_times_out(ring: Any) -> None:
    """It names the late rank and the remedy; so does that of a later call."""
    commlib.shutdown()
    with initialised(ring, "commlib"):
        for name, call in TIMED_OUT.items():
            group: Any = dist.new_group([0, 1], timedelta(seconds=0.5))
            x = torch.ones(2)
            if ring.rank == 0:
                context = f"{name} on ring 0"
                with raises(CommTimeout, context, "within 0.5 s", "rank 1", "call new_group"):
                    call(x, group)
                with raises(RingError, context, f"timed out in {name}", "call new_group"):
                    call(x, group)
            dist.all_reduce(x)
            assert_equal(x.tolist(), [2.0, 2.0], f"the group of all ranks after {name}")
            dist.destroy_process_group(group)


def waited(work: Any) -> None:
    work.get_future()  # a thread waits too
    work.wait(timedelta(seconds=0.5))


@runs_on("ranks")
def test_an_abort_of_the_group_that_made_the_ring(ring: Any) -> None:
    """The calls of this group are the ring's own, so the ring ends with all its groups."""
    commlib.shutdown()
    with initialised(ring, OURS[ring.device.type]) as world:
        other = dist.new_group([0, 1])
        x = torch.ones(2, device=ring.device)
        dist.all_reduce(x, group=other)
        made = commlib.comm(0)
        dist.barrier()
        calls: Any = calls_of(world)
        calls.abort()
        with raises(RingError, "aborted"):
            made.all_reduce(x, x)
        with raises(RingError, "aborted"):
            dist.all_reduce(x, group=other)
