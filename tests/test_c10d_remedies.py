"""Failed groups of the backend "commlib": the errors name the calls that make the groups again."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import commlib
from commlib.errors import MismatchError, RingError
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on
from tests.support.torch_groups import STOCK, initialised

WORLD = "call dist.destroy_process_group(), then dist.init_process_group(...), on every rank"
PART = (
    "call dist.destroy_process_group(group) on its members, then dist.new_group(ranks) (or "
    "split_group, init_device_mesh) on the same ranks as before"
)
PROGRAM = "then destroy the process groups that use the ring, and make them again"
BRIDGE = "call commlib.close_ring(ring), then commlib.ring_from_group(group), on every member"
# What makes this rank's group of two, on four ranks.
MAKERS: dict[str, Callable[[], Any]] = {
    "new_group": lambda: [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2],
    "split_group": lambda: dist.split_group(split_ranks=[[0, 1], [2, 3]]),
    "init_device_mesh": lambda: init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp")
    ).get_group("tp"),
}


def fail(group: Any, *advice: str) -> None:
    """Make calls that differ between the members; this and the next error give the advice."""
    x = torch.ones(4 + dist.get_rank(group) % 2)
    with raises(MismatchError, *advice):
        dist.all_reduce(x, group=group)
    with raises(RingError, "can't be used", *advice):
        dist.all_reduce(x, group=group)


def assert_works(group: Any) -> None:
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert_equal(x.tolist(), [dist.get_world_size(group)] * 2, "sum")


@runs_on("cpu_ranks")
def test_the_group_of_all_ranks(ring: Any) -> None:
    commlib.shutdown()
    with initialised(ring, "commlib"):
        fail(None, WORLD)
    with initialised(ring, "commlib"):
        assert_works(None)
        assert_works(dist.new_group([0, 1]))


@runs_on("four_ranks")
def test_groups_of_some_ranks(ring: Any) -> None:
    with initialised(ring, "commlib"):
        for make in MAKERS.values():
            group = make()
            fail(group, PART)
            assert_works(None)
            dist.destroy_process_group(group)
            assert_works(make())
        assert_works(dist.new_group([3, 1, 0, 2]))  # torch counts groups alike on every rank


def process_group_of(made: Any) -> Any:
    return None if made is None else made.process_group()


@runs_on("three_ranks")
def test_groups_on_rings_of_the_program(ring: Any) -> None:
    """The program makes both again: a group keeps the ring object that it was made with."""
    advice = "call commlib.close_ring(5), then commlib.new_ring(5, [0, 1]), on every member"
    with initialised(ring, "commlib"):
        for make in (process_group_of, lambda made: dist.new_group([0, 1])):
            made = commlib.new_ring(5, [0, 1])
            group = make(made)
            if made is not None:
                fail(group, f"{advice}; {PROGRAM}")
                commlib.close_ring(5)
            made = commlib.new_ring(5, [0, 1])
            if made is not None:
                dist.destroy_process_group(group)
            group = make(made)
            if made is not None:
                assert_works(group)
                assert_equal(commlib.ring_from_group(group) is made, True, "the ring")
                commlib.close_ring(5)
        assert_works(None)


@runs_on("cpu_ranks")
def test_ring_0_of_the_program(ring: Any) -> None:
    with initialised(ring, "commlib"):
        fail(None, f"call commlib.shutdown(), then commlib.init(), on every rank; {PROGRAM}")
        commlib.shutdown()
        again = commlib.init()
    with initialised(ring, "commlib"):
        assert_works(None)
        assert_equal(commlib.ring_from_group() is again, True, "the new ring 0")


@runs_on("cpu_ranks")
def test_rings_of_groups_of_another_backend(ring: Any) -> None:
    """Such a group does not call the ring, so it is not made again."""
    commlib.shutdown()
    with initialised(ring, STOCK["cpu"]):
        made = commlib.ring_from_group()
        x = torch.ones(4 + ring.rank)
        with raises(MismatchError, BRIDGE):
            made.all_reduce(x, x)
        commlib.close_ring(made)
        made = commlib.ring_from_group()
        x = torch.ones(2)
        made.all_reduce(x, x)
        assert_equal(x.tolist(), [2.0, 2.0], "sum")
    commlib.shutdown()  # else later tests would have a ring 0 whose store has ended
