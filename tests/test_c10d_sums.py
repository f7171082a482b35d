"""The backend "commlib" on three ranks, where the order of a sum decides about its last bits."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

import commlib
from commlib.compat.c10d.bridges import calls_of
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.ranks import NewRanks
from tests.support.torch_groups import assert_same_as_stock, initialised

Tensor = torch.Tensor
SIZES = (5, 17, 100, 4099)


def mine(*shape: int, seed: int = 0) -> Tensor:
    return sample(dist.get_rank(), shape, torch.float32, seed)


def one_tensor(device: torch.device) -> Any:
    outputs = []
    for size in SIZES:
        x, part = mine(size), torch.empty(size)
        dist.all_reduce(x)
        rooted = mine(size)
        dist.reduce(rooted, 1)
        dist.reduce_scatter_tensor(part, mine(3 * size))
        outputs += [x, part] + ([rooted] if dist.get_rank() == 1 else [])
    return outputs


def lists(device: torch.device) -> Any:
    outputs = []
    for size in SIZES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
            out = torch.empty(size)
            work: Any = dist.reduce_scatter(
                out, [mine(size, seed=i) for i in range(3)], op, async_op=size > 20
            )
            if work is not None:
                work.wait()
            outputs.append(out)
    return outputs


def coalesced(device: torch.device) -> Any:
    """Apart, adjacent, and one tensor twice."""
    apart, flat, twice = [mine(5), mine(7, 3)], mine(29), mine(6)
    adjacent = list(flat.split([5, 11, 13]))
    for later in (False, True):
        for tensors in (apart, adjacent, [twice, twice]):
            with _coalescing_manager(async_ops=later) as manager:
                for x in tensors:
                    dist.all_reduce(x)
            if later:
                manager.wait()
    group: Any = dist.group.WORLD
    ours = functional.all_reduce_coalesced([mine(4), mine(9)], "sum", group)
    return apart, flat, twice, [x + 0 for x in ours]


def same_bits(ring: Any) -> None:
    for program in (one_tensor, lists, coalesced):
        assert_same_as_stock(ring, program)
    with initialised(ring, "commlib") as world:
        group: Any = calls_of(world)
        x, integers = torch.ones(3), torch.ones(2, dtype=torch.int64)
        group.allreduce_coalesced([x, integers]).wait()
        assert_equal((x.tolist(), integers.tolist()), ([3.0] * 3, [3] * 2), "two dtypes")
        calls = ring.report()["calls"]
        with raises(commlib.errors.ArgumentError, "all_reduce on ring 0", "overlaps itself"):
            group.allreduce_coalesced([x, torch.ones(1).expand(3)])
        assert_equal(ring.report()["calls"], calls, "launches")
        group.start_coalescing()
        group.allreduce_coalesced([x, torch.ones(2)])
        group.allreduce([integers])
        group.end_coalescing().wait()
        assert_bits_equal(x, torch.full((3,), 9.0), "in a block of calls")
        assert_equal(integers.tolist(), [9, 9], "and after it")


def test_three_ranks(new_ranks: NewRanks) -> None:
    with new_ranks(3) as ranks:
        ranks(same_bits)
