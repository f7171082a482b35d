"""The drop-in import: the names and signatures of torch.distributed, on rings."""

import importlib
import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed

import commlib
from commlib.compat import torch_distributed as dist
from commlib.errors import CommTimeout
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on
from tests.support.torch_groups import end_earlier_group, store_of

CHANGED = ["init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"]


def test_names() -> None:
    assert set(dir(torch.distributed)) <= set(dir(dist))
    offered: Any = dist
    assert "all_reduce" in offered.__all__
    importlib.import_module("torch.distributed.pipelining")  # a name that is there from now on
    public = {name for name in dir(torch.distributed) if not name.startswith("_")}
    assert {*offered.__all__} == public
    assert "pipelining" in public
    program: dict[str, Any] = {}
    exec("from commlib.compat.torch_distributed import *", program)
    assert public == {*program} - {"__builtins__"}
    assert program["new_group"] is dist.new_group
    assert dist.ReduceOp is torch.distributed.ReduceOp
    assert dist.all_reduce is torch.distributed.all_reduce
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dist.no_such_name  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CHANGED)
def test_signatures(name: str) -> None:
    ours, theirs = getattr(dist, name), getattr(torch.distributed, name)
    assert ours is not theirs
    assert inspect.signature(ours) == inspect.signature(theirs)


@runs_on("ranks")
def test_an_old_program_runs_on_rings(ring: Any) -> None:
    """The backends that the program names stand for rings, of the default group and of others."""
    end_earlier_group()
    kwargs: Any = {"rank": ring.rank, "world_size": ring.size, "timeout": timedelta(seconds=30)}
    for backend in ({"backend": "gloo"}, {"backend": "cpu:gloo,cuda:nccl"}, {}):
        dist.init_process_group(**backend, store=store_of(), **kwargs)
        calls = ring.report()["calls"]
        x = torch.full((2,), ring.rank + 1.0, device=ring.device)
        dist.all_reduce(x)
        group = dist.new_group([0, 1], backend="gloo")
        dist.all_reduce(x, group=group)
        assert_equal(x.tolist(), [6.0, 6.0], str(backend))
        assert_equal(ring.report()["calls"], calls + 2, "calls of the ring")
        assert_equal(commlib.ring_from_group(group) is ring, True, "the same ring")
        out = torch.empty_like(x)
        batch = [dist.P2POp(dist.isend, x + ring.rank, 1 - ring.rank)]
        batch.append(dist.P2POp(dist.irecv, out, 1 - ring.rank))
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert_equal(out.tolist(), [7.0 - ring.rank] * 2, "of the other rank")
        dist.monitored_barrier()
        if ring.rank == 0:
            with raises(CommTimeout, "monitored_barrier", "rank 1"):
                dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        dist.barrier()
        dist.destroy_process_group()
