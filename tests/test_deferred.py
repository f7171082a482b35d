"""Tensors of asynchronous calls are kept until they have ended, and no longer than that."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commlib import deferred, ops
from tests.support.checks import assert_equal, settle
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, initialised


@runs_on("gpu_ranks")
def test_calls_of_other_kinds_release_them(comm: Any) -> None:
    """A program may go on with synchronous calls alone, as FSDP2 after DDP."""
    x, y = torch.ones(1 << 20, device=comm.device), torch.ones(9, device=comm.device)
    rows = torch.ones(2, 1024, device=comm.device, dtype=torch.bfloat16)

    def in_a_group() -> None:
        with comm.group(use_calc_stream=True):
            comm.all_reduce(y)
            comm.broadcast(y, root=0)

    calls: dict[str, Callable[[], object]] = {
        "on the caller's stream": lambda: comm.all_reduce(y, use_calc_stream=True),
        "on the comm stream": lambda: comm.all_reduce(y, use_calc_stream=False),
        "of torch.distributed": lambda: dist.all_reduce(y),
        "of a group": in_a_group,
        "of an operator": lambda: ops.all_reduce(y),
        "of a sum with a norm": lambda: ops.all_reduce_residual_norm(rows, rows, rows[0]),
    }
    with initialised(comm, OURS["cuda"]):
        for name, call in calls.items():
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            work.get_future()  # as DDP does, which drops the work then
            del work
            settle(comm)
            assert_equal(len(deferred.kept), 1, f"kept before a call {name}")
            call()
            assert_equal(len(deferred.kept), 0, f"kept after a call {name}")
