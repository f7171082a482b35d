"""The devices of groups: ``device_id=`` of ``init_process_group`` and ``new_group``."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import commlib
from commlib.compat import c10d as backend
from commlib.compat.c10d.backend import takes_subclasses
from commlib.compat.c10d.bridges import calls_of
from commlib.errors import DeviceError
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, initialised, store_of


def made_by_torch(ring: Any, store: dist.Store, device_id: torch.device | None) -> Any:
    """Make a group as torch does: it has the device in a variable of this name."""
    opts: Any = c10d._DistributedBackendOptions()
    opts.store, opts.group_id, opts.timeout = store, "bound", dist.constants.default_pg_timeout
    opts.group_rank, opts.group_size = ring.rank, ring.size
    opts.global_ranks_in_group = list(ring.ranks)
    return backend._create(opts)


@runs_on("cpu_ranks")
def test_the_device_that_a_program_names(ring: Any) -> None:
    with initialised(ring, "commlib"):
        store = store_of()
        if not takes_subclasses():  # later torch has the device in the group that it passes
            with raises(DeviceError, "cuda:7", "sees 0 GPUs"):
                made_by_torch(ring, store, torch.device("cuda", 7))
        group = made_by_torch(ring, store, torch.device("cpu"))
        assert_equal([*group.rings], ["cpu"], "rings")
        group.eager_connect_single_device(torch.device("cpu"))
        with raises(DeviceError, "device_id=cuda:7", "rings on ['cpu']", "torch.cuda.set_device"):
            group.eager_connect_single_device(torch.device("cuda", 7))
        group.shutdown()


@runs_on("all_gpu_ranks")
def test_a_group_on_its_own_gpu(ring: Any) -> None:
    """Its communicator is made at once, and groups of some ranks take the device over."""
    with initialised(ring, OURS["cuda"], device_id=ring.device) as world:
        assert_equal(world.bound_device_id, ring.device, "bound")
        assert_equal(commlib.ring_from_group(world) is ring, True, "ring 0")
        assert_equal(ring.report()["communicator"], True, "connected")
        part = dist.new_group([ring.rank], use_local_synchronization=True)
        assert_equal(commlib.ring_from_group(part).device, ring.device, "of a part")
        dist.new_group([0, 1], device_id=ring.device)
        x = torch.full((3,), ring.rank + 1.0, device=ring.device)
        dist.all_reduce(x)
        dist.barrier()
        assert_equal(x.tolist(), [3.0] * 3, "sum")
        calls: Any = calls_of(world)
        with raises(DeviceError, "device_id=cuda:7", "rings on"):
            calls.eager_connect_single_device(torch.device("cuda", 7))


@pytest.mark.two_gpus
@runs_on("all_gpu_ranks")
def test_a_gpu_that_is_not_that_of_the_ring(ring: Any) -> None:
    other = torch.device("cuda", 1 - ring.rank)
    refused = raises(DeviceError, f"device_id={other}", f"is on {ring.device}", "close_ring(0)")
    with refused, initialised(ring, OURS["cuda"], device_id=other):
        raise AssertionError("two rings of the same ranks")
    commlib.shutdown()
    with torch.cuda.device(other), initialised(ring, OURS["cuda"], device_id=other) as world:
        made = commlib.ring_from_group(world)
        assert_equal((made.ring_id, made.device), (0, other), "the ring of the group")
        x = torch.full((3,), ring.rank + 1.0, device=other)
        dist.all_reduce(x)
        assert_equal(x.tolist(), [3.0] * 3, "sum")
