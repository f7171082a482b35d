"""Groups of rings in programs, bitwise reductions, and ``split_group`` on a CPU."""

import inspect
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.compat.c10d.backend import takes_subclasses
from commlib.errors import ArgumentError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, assert_same_as_stock, initialised
from tests.test_c10d_programs import batch, model, train

Tensor = torch.Tensor


@runs_on("ranks", deadline=120)
def test_data_parallel_and_checkpoint_on_the_group_of_a_ring(ring: Any) -> None:
    """The weights are those that the default group gives, and come back from a checkpoint."""
    with initialised(ring, OURS[ring.device.type]):
        made = commlib.new_ring(7, [0, 1])
        assert made is not None
        trained = []
        for group in (None, made.process_group()):
            wrapped = DistributedDataParallel(model(ring.device), process_group=group)
            train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), ring.device)
            trained.append([one.detach().clone() for one in wrapped.parameters()])
        for one, other in zip(*trained, strict=True):
            assert_bits_equal(other, one)
        group = made.process_group()
        folder: Any = [tempfile.mkdtemp() if ring.rank == 0 else None]
        dist.broadcast_object_list(folder, 0, group)
        state = {"x": batch(ring.device, 0) * 0 + 3}
        dcp.save(state, checkpoint_id=folder[0], process_group=group)
        again = {"x": torch.zeros_like(state["x"])}
        dcp.load(again, checkpoint_id=folder[0], process_group=group)
        assert_bits_equal(again["x"], state["x"])
        commlib.close_ring(7)


def bitwise(device: torch.device) -> Any:
    results = []
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        for dtype in (torch.int32, torch.int64, torch.uint8, torch.int8):
            x = torch.arange(8, dtype=dtype, device=device) * (dist.get_rank() + 3)
            dist.all_reduce(x, op)
            y = torch.arange(8, dtype=dtype, device=device) + 5 * dist.get_rank()
            dist.reduce(y, 0, op)
            results += [x, y] if dist.get_rank() == 0 else [x]
    return results


@runs_on("cpu_ranks")
def test_bitwise_reductions(ring: Any) -> None:
    assert_same_as_stock(ring, bitwise)
    flags = torch.tensor([True, False, True]) if ring.rank else torch.tensor([True, True, False])
    for op, want in (("band", [1, 0, 0]), ("bor", [1, 1, 1]), ("bxor", [0, 1, 1])):
        assert_equal(ring.all_reduce(flags, op=op).int().tolist(), want, op)


@runs_on("cpu_ranks")
def test_split_group(ring: Any) -> None:
    with initialised(ring, "commlib"):
        part: Any = dist.split_group(split_ranks=[[0], [1]], group_desc="alone")
        assert_equal((part.size(), part.group_desc), (1, "alone"), "a part each")
        both: Any = dist.split_group(split_ranks=[[0, 1]])
        x = torch.ones(2)
        dist.all_reduce(x, group=both)
        assert_equal(x.tolist(), [2.0, 2.0], "all_reduce of a part")
        none = dist.split_group(split_ranks=[[0]])
        assert_equal(none is None, ring.rank == 1, "a rank in no part")
        with raises(ArgumentError, "split_group", "backend='gloo'", "'commlib'"):
            dist.split_group(split_ranks=[[0, 1]], backend="gloo")
        with raises(ArgumentError, "split_group", "at most once"):
            dist.split_group(split_ranks=[[0, 0]])
        with raises(ArgumentError, "split_group", "0 to 1, each at most once"):
            dist.split_group(split_ranks=[[0, 7], [1]])
        with raises(ArgumentError, "a list without tensors"):
            dist.all_reduce_coalesced([])


@runs_on("cpu_ranks")
def test_split_group_of_ranks_in_other_groups(ring: Any) -> None:
    """Torch names a part by the number of groups that a rank is in: here another on each rank."""
    with initialised(ring, "commlib", timeout=timedelta(seconds=8)) as world:
        for _ in range(ring.rank):
            dist.new_group([ring.rank], use_local_synchronization=True)
        parent: Any = dist.split_group(split_ranks=[[0, 1]])
        part: Any = dist.split_group(parent, [[1, 0]])
        x = torch.ones(2)
        for group in (parent, part):
            dist.all_reduce(x, group=group)
        assert_equal(x.tolist(), [4.0, 4.0], "sums in two groups")
        if not takes_subclasses():  # there, C++ makes the group and its store
            again = world.split_group([0, 1], group_name=f"the name of rank {ring.rank}")
            again.allreduce([x]).wait()
            assert_equal(x.tolist(), [8.0, 8.0], "a sum in a group that torch names")
            again.shutdown()


@runs_on("cpu_ranks")
def test_split_group_of_another_backend(ring: Any) -> None:
    """Torch's own function gets all arguments, also those that are new."""
    with initialised(ring, "gloo") as world:
        with raises(RuntimeError):
            dist.split_group(world, [[0], [1]])
        if "backend" in inspect.signature(dist.split_group).parameters:
            with raises(RuntimeError):
                dist.split_group(world, [[0], [1]], backend="gloo")
