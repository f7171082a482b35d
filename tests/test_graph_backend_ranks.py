"""graph.backend: collectives of rings are in the graphs, those of stock groups between them."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import commlib
from commlib import graph, ops
from commlib.errors import CommError
from tests.support.checks import assert_bits_equal, assert_equal, raises, wide
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, initialised

SIZE, STEPS = 8, 4
STRICT = {"on_fail": "raise"}


def drawn(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, (SIZE, SIZE), generator=generator).float()


def rows_of(function: str) -> list[dict[str, Any]]:
    """Return the rows of a compiled function; other tests' graphs may be there on these ranks."""
    return [row for row in graph.report() if f"({function} at " in row["function"]]


@runs_on("unified_ranks")
def test_collectives_of_rings(comm: Any) -> None:
    """Gathered weights and reduced sums, forward and backward, against the formula in NumPy."""

    def projected(x: Tensor, shard: Tensor) -> Tensor:
        return ops.all_reduce(x @ ops.all_gather(shard), backward="identity")

    compiled = torch.compile(projected, backend=graph.backend, fullgraph=True, options=STRICT)
    whole = drawn(100)
    shard = torch.nn.Parameter(whole.chunk(comm.size)[comm.rank].to(comm.device, copy=True))
    for step in range(STEPS):
        x = drawn(step * comm.size + comm.rank).to(comm.device)
        out = compiled(x, shard)
        out.backward(torch.ones_like(out))
        sides = [wide(drawn(step * comm.size + rank)) for rank in range(comm.size)]
        total = np.sum(sides, axis=0)
        assert_bits_equal(out.detach(), torch.tensor(total @ wide(whole)).float(), f"step {step}")
        rows = np.split(total.T @ np.ones((SIZE, SIZE)), comm.size)[comm.rank]
        assert_bits_equal(shard.grad, torch.tensor(rows).float(), f"gradient in step {step}")
        shard.grad = None
    (row,) = rows_of("projected")
    names = [text.split()[0] for text in row["collectives"]]
    assert_equal(names, ["all_gather", "all_reduce", "reduce_scatter"], "collectives in graphs")
    assert_equal((row["replays"], row["eager"]), (STEPS - 1, None), "replays")


def through(x: Tensor, weight: Tensor, group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    reduced: Tensor = functional.wait_tensor(functional.all_reduce(x @ weight, "sum", group))
    return reduced @ weight


def through_ring(x: Tensor, weight: Tensor) -> Tensor:
    return through(x, weight, "ring")


def through_gloo(x: Tensor, weight: Tensor) -> Tensor:
    return through(x, weight, "gloo")


def replayed(comm: Any, name: str, group: Any, f: Any) -> tuple[list[str], list[str]]:
    """Return the collectives in graphs, and why others are outside."""
    torch._C._distributed_c10d._register_process_group(name, group)
    compiled = torch.compile(f, backend=graph.backend, fullgraph=True, options=STRICT)
    weight = torch.eye(SIZE, device=comm.device) * 2
    torch._dynamo.mark_static_address(weight)
    for step in range(STEPS):
        out = compiled(drawn(step * comm.size + comm.rank).to(comm.device), weight)
        sides = [wide(drawn(step * comm.size + rank)) for rank in range(comm.size)]
        total = np.sum(sides, axis=0)
        assert_bits_equal(out, torch.tensor(total * 4).float(), f"step {step}")
    torch._C._distributed_c10d._unregister_process_group(name)
    rows = rows_of(f.__name__)
    assert_equal({row["replays"] for row in rows if not row["eager"]}, {STEPS - 1}, "replays")
    inside = [text.split()[0] for row in rows for text in row.get("collectives", [])]
    return inside, [row["eager"] for row in rows if row["eager"]]


@runs_on("unified_ranks")
def test_functional_collectives_of_our_groups(comm: Any) -> None:
    with initialised(comm, OURS[comm.device.type]):
        found = replayed(comm, "ring", dist.group.WORLD, through_ring)
    assert_equal(found, (["all_reduce"], []), "collectives inside graphs, and outside")


@runs_on("unified_ranks")
def test_functional_collectives_of_stock_groups(comm: Any, tmp_path: Path) -> None:
    group = dist.ProcessGroup(dist.HashStore(), comm.rank, comm.size)
    store = dist.FileStore(str(tmp_path / "meet"), comm.size)
    gloo = dist.ProcessGroupGloo(store, comm.rank, comm.size)
    group._register_backend(comm.device, dist.ProcessGroup.BackendType.GLOO, gloo)
    text = "_c10d_functional.all_reduce.default on group 'gloo' of torch.distributed"
    found = replayed(comm, "gloo", group, through_gloo)
    assert_equal(found, ([], [text]), "collectives inside graphs, and outside")


@runs_on("unified_ranks")
def test_a_ring_that_is_closed_first(comm: Any) -> None:
    """Compiled code whose graphs hold calls of a closed ring says so, and is freed."""

    def summed(x: Tensor) -> Tensor:
        return ops.all_reduce(x @ x, ring_id=111)

    for turn in range(2):  # a ring of the same number has new graphs
        commlib.new_ring(111, range(comm.size))
        compiled = torch.compile(summed, backend=graph.backend, fullgraph=True, options=STRICT)
        x = torch.eye(SIZE, device=comm.device) * (turn + 1)
        for step in range(STEPS):
            assert_equal(compiled(x)[0, 0].item(), (turn + 1) ** 2 * comm.size, f"step {step}")
        (row,) = rows_of("summed")
        assert_equal((row["replays"], row["eager"]), (STEPS - 1, None), "replays")
        commlib.close_ring(111)
        with raises(CommError, "ring 111"):
            compiled(x)
        torch._dynamo.reset()
        del compiled
        gc.collect()
        assert_equal(rows_of("summed"), [], "graphs of freed code")
    comm.barrier()
