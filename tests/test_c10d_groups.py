"""Groups of the backend "commlib": their rings, works, deadlines and ends, and the bridges."""

import configparser
import inspect
import warnings
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import commlib
from commlib.compat.c10d import group_rings
from commlib.compat.c10d.backend import Backend, takes_subclasses
from commlib.compat.c10d.bridges import calls_of
from commlib.errors import ArgumentError, CommTimeout, RingError
from commlib.rendezvous import environment
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, STOCK, end_earlier_group, initialised

CONFIGS = {
    "commlib": "cpu:commlib,cuda:commlib",
    "cpu:commlib,cuda:commlib": "cpu:commlib,cuda:commlib",
    "cpu:gloo,cuda:commlib": "cpu:gloo,cuda:commlib",
}
manager = commlib.CommContextManager.instance()


def ours(ring: Any) -> str:
    return OURS[ring.device.type]


@runs_on("ranks")
def test_a_group_over_the_ranks_of_a_ring_is_that_ring(ring: Any) -> None:
    """No second communicator: groups over the same ranks share one ring, in the program's order."""
    before = manager.rings()
    with initialised(ring, ours(ring)) as world:
        assert_equal(commlib.ring_from_group() is ring, True, "the group of all ranks is ring 0")
        again = dist.new_group([0, 1], group_desc="data parallel")
        assert_equal(commlib.ring_from_group(again) is ring, True, "a second group of all ranks")
        assert_equal((again.group_desc, again is world), ("data parallel", False), "its own name")
        alone = dist.new_group([ring.rank], use_local_synchronization=True)
        small = commlib.ring_from_group(alone)
        assert_equal((small.ranks, small.size), ((ring.rank,), 1), "a group of one rank")
        x = torch.full((2,), 3.0, device=ring.device)
        dist.all_reduce(x, group=alone)
        assert_equal(x.tolist(), [3.0, 3.0], "all_reduce of one rank")
        calls = ring.report()["calls"]
        dist.all_reduce(x, group=again)
        assert_equal(ring.report()["calls"], calls + 1, "calls of the ring")
        dist.destroy_process_group(alone)
        with raises(RingError, "closed"):
            small.barrier()
    assert_equal(manager.rings(), before, "rings after the groups")
    ring.barrier()


@runs_on("ranks")
def test_without_a_ring_the_group_of_all_ranks_makes_ring_0(ring: Any) -> None:
    """The store of init_process_group is the meeting point; a store is all that a program needs."""
    commlib.shutdown()
    with initialised(ring, ours(ring), timeout=timedelta(seconds=20)):
        made = commlib.comm(0)
        assert_equal((made.ranks, made.timeout), (ring.ranks, 20.0), "ring 0")
        assert_equal(commlib.init() is made, True, "init() returns it")
        other = commlib.new_ring(5, [0, 1])
        assert other is not None
        assert_equal(commlib.ops.all_reduce(torch.ones(1, device=made.device), other).item(), 2.0)
        commlib.close_ring(5)
    with raises(RingError, "ring 0"):
        commlib.comm(0)


@runs_on("ranks")
def test_the_process_group_of_a_ring(ring: Any) -> None:
    """``ring.process_group()`` is a group as any other, and its calls are the ring's."""
    end_earlier_group()
    with raises(ArgumentError, "not initialised", 'init_process_group("commlib")'):
        ring.process_group()
    for backend in (OURS, STOCK):  # also in a program of another backend
        with initialised(ring, backend[ring.device.type]) as world:
            assert_equal(ring.process_group() is world, backend is OURS, "the group of ring 0")
            turned = commlib.new_ring(7, [1, 0], name="turned")
            assert turned is not None
            group = turned.process_group()
            assert_equal(turned.process_group() is group, True, "one object")
            assert_equal(commlib.ring_from_group(group) is turned, True, "and back")
            assert_equal(dist.get_rank(group), 1 - ring.rank, "rank")
            assert_equal(dist.get_process_group_ranks(group), [1, 0], "ranks")
            assert_equal((dist.get_backend(group), group.group_desc), ("commlib", "turned"))
            x = torch.full((2,), float(ring.rank), device=ring.device)
            dist.broadcast(x, src=1, group=group)
            assert_equal(x.tolist(), [1.0, 1.0], "broadcast from global rank 1")
            mesh = DeviceMesh.from_group(group, ring.device.type, mesh_dim_names=("tp",))
            assert_equal(commlib.ring_from_group(mesh["tp"]) is turned, True, "of a mesh")
            commlib.close_ring(7)
            with raises(RingError, "ring 7"):
                dist.all_reduce(x, group=group)


@runs_on("ranks")
def test_the_process_group_of_a_ring_under_an_old_id(ring: Any) -> None:
    with initialised(ring, ours(ring)):
        for number in range(2):
            made = commlib.new_ring(5, [1, 0])
            assert made is not None
            group = made.process_group()
            assert_equal(commlib.ring_from_group(group) is made, True, f"group {number}")
            x = torch.ones(2, device=ring.device)
            dist.all_reduce(x, group=group)
            assert_equal(x.tolist(), [2.0, 2.0], f"all_reduce {number}")
            commlib.close_ring(5)


@runs_on("ranks")
def test_groups_end_the_rings_of_groups_alone(ring: Any) -> None:
    """A ring of the program stays, also one that it makes under the id of a closed one."""
    with initialised(ring, ours(ring)):
        group: Any = calls_of(dist.new_group([0, 1]))
        group.abort()  # on the program's ring 0
        one, two = (dist.new_group([ring.rank], use_local_synchronization=True) for _ in range(2))
        alone = commlib.ring_from_group(one)
        group = calls_of(one)
        group.shutdown()
        group.abort()
        dist.destroy_process_group(one)
        x = torch.ones(1, device=ring.device)
        dist.all_reduce(x, group=two)
        assert_equal(x.item(), 1.0, "the other group of the ring")
        dist.destroy_process_group(two)
        with raises(RingError, "closed"):
            alone.barrier()
    ring.barrier()
    commlib.shutdown()
    with initialised(ring, ours(ring)):
        assert_equal(commlib.comm(0).ranks, ring.ranks, "ring 0 of the group")
        commlib.shutdown()
        again = commlib.init()
    again.barrier()


@runs_on("ranks")
def test_the_ring_of_another_backends_group(ring: Any) -> None:
    """A group of stock gloo or NCCL keeps working; its ring is made once, over the same ranks."""
    with initialised(ring, STOCK[ring.device.type]):
        group = dist.new_group([0, 1])
        assert_equal(commlib.ring_from_group(group) is ring, True, "ring 0 has the same ranks")
        alone = dist.new_group([ring.rank], use_local_synchronization=True)
        made = commlib.ring_from_group(alone)
        assert_equal(commlib.ring_from_group(alone) is made, True, "made once")
        x = torch.ones(2, device=ring.device)
        dist.all_reduce(x, group=group)
        commlib.ops.all_reduce_(x, ring)
        assert_equal(x.tolist(), [4.0, 4.0], "both")
        with raises(ArgumentError, "expected a process group", "one dimension of a DeviceMesh"):
            commlib.ring_from_group("tp")
        commlib.close_ring(made.ring_id)


@runs_on("ranks")
def test_meshes(ring: Any) -> None:
    with initialised(ring, ours(ring)):
        mesh = init_device_mesh(ring.device.type, (1, 2), mesh_dim_names=("dp", "tp"))
        tp, dp = commlib.ring_from_group(mesh["tp"]), commlib.ring_from_group(mesh["dp"])
        assert_equal((tp is ring, dp.ranks), (True, (ring.rank,)), "rings of a mesh")


@runs_on("ranks")
def test_split(ring: Any) -> None:
    """``split_group`` of torch needs a GPU; the group's own method does not."""
    with initialised(ring, ours(ring)) as world:
        calls: Any = calls_of(world)
        if isinstance(calls, Backend):  # torch's group splits its backends
            store = dist.PrefixStore("part", distributed_c10d._get_default_store())
            part: Any = calls.split(store, [ring.rank], None)
            assert_equal(calls.split(store, [1 - ring.rank], None), None, "of the other rank")
        else:
            part = calls.split_group([ring.rank], group_name=f"part {ring.rank}")
            assert_equal(part.group_name, f"part {ring.rank}", "name")
            assert_equal(calls.split_group([1 - ring.rank]), None, "of the other rank")
        assert_equal((part.size(), part.rank()), (1, 0), "a part")
        part.shutdown()


@runs_on("ranks")
def test_works_and_futures(ring: Any) -> None:
    with initialised(ring, ours(ring)) as world:
        x = torch.ones(3, device=ring.device)
        work: Any = dist.all_reduce(x, async_op=True)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        assert_equal(doubled.wait().tolist(), [4.0] * 3, "a callback of the future")
        assert_equal(work.wait(timedelta(seconds=20)), True, "wait with a timeout")
        assert_equal(work.wait(20.0), True, "wait with a number of seconds")
        if not takes_subclasses():  # there, C++ passes waits and futures of a work alone
            assert_equal((work.is_completed(), work.is_success()), (True, True), "state")
            assert_equal((work.exception(), work.result()[0] is x), (None, True), "outcome")
        outs = [torch.empty(3, device=ring.device) for _ in range(2)]
        future = dist.all_gather(outs, x, async_op=True).get_future()
        assert_equal([out.tolist() for out in future.wait()], [[2.0] * 3] * 2, "a list's future")
        number = world._get_sequence_number_for_group()
        dist.barrier()
        assert_equal(world._get_sequence_number_for_group(), number + 1, "sequence")


@runs_on("ranks")
def test_a_future_is_complete_after_a_wait(ring: Any) -> None:
    """Asked for before or after; every wait completes it, on a CPU also that of a worker thread."""
    with initialised(ring, ours(ring)):
        x = torch.ones(3, device=ring.device)
        for turn in range(50):
            early: Any = dist.broadcast(x, 0, async_op=True)
            future = early.get_future()
            seen = future.then(lambda done, work=early: work.get_future() is done)
            early.wait()
            late: Any = dist.broadcast(x, 0, async_op=True)
            late.wait()
            for one in (future, late.get_future()):
                assert_equal(one.done(), True, f"turn {turn}")
                assert_equal(one.value()[0].tolist(), [1.0] * 3, f"value of turn {turn}")
            if not takes_subclasses():  # there, C++ makes an object per call
                assert_equal(seen.wait(), True, "one future per work")


@runs_on("cpu_ranks")
def test_a_future_has_the_error_of_a_wait(ring: Any) -> None:
    commlib.shutdown()
    with initialised(ring, "commlib") as group:
        store = distributed_c10d._get_default_store()
        group.set_timeout(timedelta(seconds=1))
        if ring.rank == 0:
            work: Any = dist.all_reduce(torch.ones(1), async_op=True)
            future = work.get_future()
            with raises(CommTimeout, "rank 1"):
                work.wait()
            assert_equal(future.done(), True, "after the error")
            for each in (future, work.get_future()):
                with raises(CommTimeout, "rank 1"):
                    each.value()
            store.set("over", "1")
        else:
            store.wait(["over"], timedelta(seconds=20))


@runs_on("cpu_ranks")
def test_a_member_that_never_calls(ring: Any) -> None:
    """Each wait of a group ends at the group's deadline, and the error names who is late."""
    commlib.shutdown()
    with initialised(ring, "commlib") as group:
        store = distributed_c10d._get_default_store()
        group.set_timeout(timedelta(seconds=1))
        if ring.rank == 0:
            with raises(CommTimeout, "all_reduce on ring 0", "rank 1"):
                dist.all_reduce(torch.ones(1))
            with raises(RingError, "ring 0"):  # the reason is repeated
                dist.all_reduce(torch.ones(1))
            store.set("over", "1")
        else:
            store.wait(["over"], timedelta(seconds=20))


@runs_on("ranks")
def test_monitored_barrier_of_torch(ring: Any) -> None:
    """Torch has it for gloo by name; a group of gloo and a process outside a group keep it."""
    with initialised(ring, ours(ring)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a process outside the group is warned
        dist.monitored_barrier()
        stock, alone = dist.new_group([0, 1], backend="gloo"), dist.new_group([0])
        calls = ring.report()["calls"]
        dist.monitored_barrier(stock, timedelta(seconds=20), wait_all_ranks=True)
        dist.monitored_barrier(alone)
        assert_equal(ring.report()["calls"], calls, "calls of the ring")
        if ring.rank == 0:
            seconds: Any = 0.3  # C++ takes a number too
            for timeout in (timedelta(seconds=seconds), seconds):
                with raises(CommTimeout, "monitored_barrier", "0.3 s", "rank 1"):
                    dist.monitored_barrier(timeout=timeout)
            with raises(CommTimeout, "monitored_barrier", "0.001 s", "rank 1"):
                dist.monitored_barrier(timeout=timedelta(0))
    signature = inspect.signature(dist.monitored_barrier)
    assert_equal([*signature.parameters], ["group", "timeout", "wait_all_ranks"], "signature")


@runs_on("ranks")
def test_timeouts_of_single_calls(ring: Any) -> None:
    """A timeout of a wait, of a barrier, or of a monitored barrier is shorter than the group's."""
    commlib.shutdown()
    with initialised(ring, ours(ring), timeout=timedelta(seconds=20)) as world:
        group, store = calls_of(world), distributed_c10d._get_default_store()
        assert group is not None
        if ring.rank == 0:
            with raises(CommTimeout, "monitored_barrier", "0.3 s", "rank 1"):
                group.monitored_barrier(timedelta(seconds=0.3))
            store.set("first", "1")
            store.wait(["late"], timedelta(seconds=20))
        else:
            store.wait(["first"], timedelta(seconds=20))
            with raises(CommTimeout, "rank 0"):  # which has given up
                group.monitored_barrier(timedelta(seconds=0.3))
            store.set("late", "1")
        group.monitored_barrier()
        group.monitored_barrier()
        work = dist.all_reduce(torch.ones(1, device=ring.device), async_op=True)
        work.wait()  # connected
        if ring.rank == 0:
            work = dist.all_reduce(torch.ones(1, device=ring.device), async_op=True)
            with raises(CommTimeout, "all_reduce on ring 0", "within 0.5 s", "rank 1"):
                work.wait(timedelta(seconds=0.5))
            store.set("second", "1")
        else:
            store.wait(["second"], timedelta(seconds=20))
        group.abort()


@runs_on("ranks")
def test_a_group_whose_ranks_do_not_meet(ring: Any) -> None:
    with initialised(ring, ours(ring)):
        if ring.rank == 0:
            store = dist.PrefixStore("turned", distributed_c10d._get_default_store())
            world, second = environment.joined(0, 2), timedelta(seconds=1)
            remedy = group_rings.group_remedy()
            with raises(CommTimeout, "group 'turned'", "waiting for ranks [1]", "dist.new_group("):
                group_rings.make_rings("turned", (1, 0), world, store, second, remedy)
        dist.barrier()


@runs_on("ranks")
def test_a_wrong_call_is_an_error_before_any_launch(ring: Any) -> None:
    """The errors are those of rings, on the rank that is wrong, and the group goes on."""
    with initialised(ring, ours(ring)):
        x = torch.ones(4, device=ring.device)
        with raises(commlib.errors.ShapeError, "all_gather on ring 0", "expected 8"):
            dist.all_gather_into_tensor(torch.empty(3, device=ring.device), x)
        with raises(commlib.errors.DtypeError, "int16"):
            dist.all_reduce(x.to(torch.int16))
        dist.all_reduce(x)
        assert_equal(x.tolist(), [2.0] * 4, "after errors")


@runs_on("ranks")
def test_registered_once(ring: Any) -> None:
    commlib.compat.c10d.register()
    assert_equal(dist.Backend.backend_list.count("commlib"), 1, "backends")
    for form in ("commlib", "cpu:commlib,cuda:commlib", "cpu:gloo,cuda:commlib"):
        with initialised(ring, form):
            assert_equal(dist.get_backend_config(), CONFIGS[form], form)
            x = torch.ones(2, device=ring.device)
            calls = ring.report()["calls"]
            dist.all_reduce(x)
            stock = "cpu:gloo" in form and ring.device.type == "cpu" and takes_subclasses()
            assert_equal(ring.report()["calls"], calls + (not stock), form)


def test_the_entry_point_is_the_registrar() -> None:
    """Torch 2.14 and newer look the backend up by its name, and call what they find."""
    config = configparser.ConfigParser()
    config.read(Path(__file__).resolve().parent.parent / "setup.cfg")
    name, _, value = config["options.entry_points"]["torch.distributed.backends"].partition("=")
    loaded = EntryPoint(name.strip(), value.strip(), "torch.distributed.backends").load()
    assert name.strip() == "commlib"
    assert loaded is commlib.compat.c10d.register
