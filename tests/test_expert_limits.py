"""Calls of the expert exchange that no memory or no other rank allows: errors that say why."""

from typing import Any

import torch

from commlib import ops
from commlib.errors import ArgumentError, CommError
from tests.support.checks import assert_equal, raises
from tests.support.operator import calls
from tests.support.runs_on import runs_on
from tests.test_custom_allreduce import another
from tests.test_expert_errors import tensors

SAME = "must require grad on all ranks or on none", "x.detach() on every rank"


@runs_on("ranks")
def test_a_capacity_without_memory(comm: Any) -> None:
    """Memory is tried before an exchange, so that no rank waits for another."""
    good, before = {**tensors(comm), "capacity": 2**28}, calls(comm)
    good["x"] = good["x"].repeat(1, 64)
    words = "capacity=268435456 needs", f"bytes on {comm.device}", "2 experts with width 1024"
    with raises(ArgumentError, "expert_dispatch on ring 0", *words, "pass a smaller capacity"):
        ops.expert_dispatch(**good)
    assert_equal(calls(comm), before, "calls launched by a refused one")
    ops.expert_dispatch(**tensors(comm))


@runs_on("ranks")
def test_a_result_without_memory(comm: Any) -> None:
    """The sums of many tokens are tried before the exchange too; the error says whose they are."""
    sent = ops.expert_dispatch(**tensors(comm))
    positions = sent.handle.positions[:1].expand(2**40, -1)
    handle = sent.handle._replace(positions=positions, expert_ids=positions)
    before = calls(comm)
    words = "expert_combine on ring 0", "the result of 1099511627776 tokens needs", "rows of width"
    with raises(ArgumentError, *words, "pass fewer tokens to expert_dispatch"):
        ops.expert_combine(sent.rows, handle)
    assert_equal(calls(comm), before, "calls launched by a refused one")
    ops.expert_combine(sent.rows, sent.handle)


@runs_on("cpu_ranks")
def test_a_gradient_on_one_rank(comm: Any) -> None:
    """A rank that goes back alone says that the others have no gradient."""
    for ring_id, first in ((108, False), (109, True)):  # whether all ranks went back before
        with another(comm, ring_id, timeout=4) as ring:
            kwargs = {**tensors(comm), "ring_id": ring_id}
            for _ in range(first):
                x = kwargs["x"].clone().requires_grad_()
                ops.expert_dispatch(**{**kwargs, "x": x}).rows.sum().backward()
            x = kwargs["x"].clone().requires_grad_(comm.rank == 0)
            sent = ops.expert_dispatch(**{**kwargs, "x": x})
            if comm.rank == 0:
                with raises(CommError, "the backward of expert_dispatch", *SAME):
                    sent.rows.sum().backward()
            else:
                with raises(CommError, "barrier"):
                    ring.barrier()
            comm.barrier()


@runs_on("cpu_ranks")
def test_a_gradient_of_counted_rows_on_one_rank(comm: Any) -> None:
    """The error of a backward names the collective that the program has called."""
    counts = torch.ones(comm.size, dtype=torch.int64)
    with another(comm, 110, timeout=4) as ring:
        x = torch.ones(comm.size, 8, requires_grad=comm.rank == 0)
        rows = ops.global_scatter(x, counts, counts, 110, capacity=comm.size)
        if comm.rank == 0:
            with raises(CommError, "the backward of global_scatter", *SAME):
                rows.sum().backward()
        else:
            with raises(CommError, "barrier"):
                ring.barrier()
        comm.barrier()
