"""global_scatter and global_gather with capacity=: counts on the device, fixed shapes."""

from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.exc import TorchRuntimeError

from commlib import graph, ops
from commlib.errors import ArgumentError, CapacityError, DeviceError, DtypeError, ShapeError
from commlib.ops.expert_parallel.counted_rows import sendable
from commlib.ops.expert_parallel.memory import enough_memory, tables_needed
from tests.support.checks import (
    assert_bits_equal,
    assert_equal,
    bits,
    from_bits,
    on_gpu,
    raises,
    sample,
    settle,
)
from tests.support.examples import examples
from tests.support.operator import calls, compile_whole
from tests.support.ranks import NewRanks, Ranks
from tests.support.runs_on import runs_on
from tests.test_custom_allreduce import another
from tests.test_expert_graphs import check_replays
from tests.test_global_scatter_gather import Counts, drawn, inputs, own_counts, scattered

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
KNOWN: Counts = [[[1, 2], [3, 0]], [[2, 1], [1, 2]]]


def padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the rows and zeros after them."""
    out = torch.zeros((count, rows.shape[1]), dtype=rows.dtype, device=rows.device)
    out[: len(rows)] = rows
    return out


def both_ways(comm: Any, counts: Counts, dtype: torch.dtype, spare: int = 2, **how: Any) -> None:
    """Send to the experts and back; ``spare`` rows of the result, and of x, are not used."""
    every = inputs(counts, 8, dtype)
    local_rows, mine = every[comm.rank].to(comm.device), own_counts(comm, counts, comm.device)
    rows = from_bits(scattered([bits(x) for x in every], counts, comm.rank), dtype)
    most = max(int(np.array(counts)[:, rank].sum()) for rank in range(comm.size)) + spare
    x = torch.cat([local_rows, torch.full((spare, 8), torch.nan, dtype=dtype, device=comm.device)])
    received = ops.global_scatter(x, **mine, capacity=max(most, 1), **how)
    assert_bits_equal(received, padded(rows, max(most, 1)), f"scattered {dtype} {counts}")
    capacity = max(len(local_rows) + spare, 1)
    back = ops.global_gather(received, **mine, capacity=capacity, **how)
    assert_bits_equal(back, padded(local_rows, capacity), f"and back {dtype} {counts}")


def values(comm: Any) -> None:
    for seed, (experts, most) in enumerate([(1, 3), (3, 5), (2, 0), (2, 4)]):
        counts = drawn(comm.size, experts, most, seed)
        for dtype in DTYPES:
            both_ways(comm, counts, dtype)
        both_ways(comm, counts, torch.float32, spare=0, use_calc_stream=False)


def test_values(ranks: Ranks) -> None:
    ranks(values)


def test_values_of_many_ranks(many_ranks: Ranks) -> None:
    many_ranks(values)


def test_values_of_four(new_ranks: NewRanks) -> None:
    with new_ranks(4) as ranks:
        ranks(values)


@examples(20)
@given(flat=st.lists(st.integers(0, 4), min_size=8, max_size=8))
def test_any_counts(unified_ranks: Ranks, flat: list[int]) -> None:
    unified_ranks(both_ways, np.array(flat).reshape(2, 2, 2).tolist(), torch.float32)


def expert_layer(x: torch.Tensor, capacity: int, **mine: torch.Tensor) -> torch.Tensor:
    received = ops.global_scatter(x, **mine, capacity=capacity)
    return ops.global_gather(torch.tanh(received) * 2, **mine, capacity=x.shape[0])


@runs_on("ranks")
def test_gradients(comm: Any) -> None:
    """As without a capacity, eager and compiled; rows that are not sent get 0."""
    for seed in range(3):
        counts = drawn(comm.size, 2, 4, seed)
        every, mine = inputs(counts, 8, torch.float32), own_counts(comm, counts, comm.device)
        local_rows = every[comm.rank]
        results = []
        for call in (expert_layer, compile_whole(expert_layer)):
            x = padded(local_rows, len(local_rows) + 3).to(comm.device).requires_grad_()
            out = call(x, 40, **mine)
            out.backward(x.detach())
            results.append((out.detach(), x.grad))
        x = local_rows.to(comm.device, copy=True).requires_grad_()
        on_host = own_counts(comm, counts)
        received = ops.global_scatter(x, **on_host)
        out = ops.global_gather(torch.tanh(received) * 2, **on_host)
        out.backward(x.detach())
        assert x.grad is not None
        for result, grad in results:
            assert_bits_equal(result, padded(out.detach(), len(result)), "result")
            assert grad is not None
            assert_bits_equal(grad, padded(x.grad, len(grad)), "gradient")


@runs_on("ranks")
def test_rows_without_elements(comm: Any) -> None:
    """Rows of width 0 go both ways in their number, and so does their gradient."""
    mine = own_counts(comm, KNOWN, comm.device)
    x = torch.zeros(6, 0, device=comm.device, requires_grad=True)
    received = ops.global_scatter(x, **mine, capacity=9)
    assert_equal(tuple(received.shape), (9, 0), "scattered")
    back = ops.global_gather(received, **mine, capacity=6)
    assert_equal(tuple(back.shape), (6, 0), "and back")
    back.sum().backward()
    assert_equal(x.grad is not None and tuple(x.grad.shape), (6, 0), "gradient")


def step(x: torch.Tensor, local: torch.Tensor, expected: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    out = expert_layer(x, 40, local_count=local, global_count=expected)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    return out.detach(), grad


@runs_on("ranks", deadline=120)
def test_captured(comm: Any) -> None:
    """One graph for any counts: they are read at each replay."""
    captured = graph.capture(step, outputs="copy")
    for seed in range(8):
        counts = drawn(comm.size, 2, 3, seed)
        mine = own_counts(comm, counts, comm.device)
        x = sample(comm.rank, (14, 8), torch.float32, seed).to(comm.device)
        for one, other in zip(captured(x, *mine.values()), step(x, *mine.values()), strict=True):
            assert_bits_equal(one, other, f"replay {seed}")
    check_replays(captured, 7)


def reported(comm: Any) -> None:
    """Raise what the device has reported."""
    settle(comm)
    comm.check()


def wrong(comm: Any, **values: Any) -> None:
    """Scatter with counts of which some are wrong, and look."""
    mine = {**own_counts(comm, KNOWN, comm.device), **values}
    x = inputs(KNOWN, 8, torch.float32)[comm.rank].to(comm.device)
    ops.global_scatter(x, **mine, capacity=20)
    reported(comm)


@runs_on("ranks")
def test_mismatches(comm: Any) -> None:
    """Every rank gets the error, from the call on a CPU and from the next check on a GPU."""
    mine = own_counts(comm, KNOWN, comm.device)
    x = inputs(KNOWN, 8, torch.float32)[comm.rank].to(comm.device)
    more = mine["global_count"].clone()
    if comm.rank == 1:
        more[0] += 1  # rank 0 sends 3 rows to rank 1's expert 0
    words = ("rank 0 has 3 rows for expert 0 of rank 1", "rank 1 expects 4", "global_count = ops")
    with raises(ArgumentError, "global_scatter on ring 0", *words):
        wrong(comm, global_count=more)
    below = mine["local_count"].clone()
    below[1] -= 5 * (comm.rank == 0)
    with raises(ArgumentError, "local_count has a number below 0"):
        wrong(comm, local_count=below)
    few = x[:-1] if comm.rank == 0 else x
    with raises(ShapeError, "local_count of rank 0 adds up to 6 rows", "at most 5"):
        ops.global_scatter(few, **mine, capacity=20)
        reported(comm)
    with raises(CapacityError, "the experts of rank 0 get 6 rows", "capacity=5"):
        ops.global_scatter(x, **mine, capacity=5)
        reported(comm)
    with raises(ShapeError, "global_gather", "local_count of rank 0 adds up to 6 rows"):
        ops.global_gather(padded(x, 20), **mine, capacity=5 + comm.rank)
        reported(comm)
    huge = {role: counts + 2**62 for role, counts in mine.items()}
    with raises(ShapeError, f"local_count of rank 0 adds up to {6 + 2**64} rows"):
        wrong(comm, **huge)
    reported(comm)
    both_ways(comm, KNOWN, torch.float32)


@runs_on("ranks")
def test_other_numbers(comm: Any) -> None:
    """Every rank gets the error from the call itself, before anything is launched."""
    mine = own_counts(comm, KNOWN, comm.device)
    x = inputs(KNOWN, 8, torch.float32)[comm.rank].to(comm.device)
    with another(comm, 101) as ring:
        before = calls(ring)
        for capacity in (20, 30):  # and again: a failed comparison is not remembered
            with raises(ShapeError, "global_scatter on ring 101", "capacity is [20, 21], by rank",
                        "the same number on every rank"):  # fmt: skip
                ops.global_scatter(x, **mine, ring_id=101, capacity=20 + comm.rank)
            with raises(ShapeError, "global_gather", "x has [30, 31] rows on the ranks"):
                ops.global_gather(padded(x, 30 + comm.rank), **mine, ring_id=101, capacity=capacity)
        few = {role: counts[: 2 + 2 * comm.rank] for role, counts in mine.items()}
        with raises(ShapeError, "global_scatter", "local_count has [2, 4] entries"):
            ops.global_scatter(x, **few, ring_id=101, capacity=20)
        compiled = compile_whole(partial(ops.global_scatter, ring_id=101, capacity=8 + comm.rank))
        with raises(ShapeError, "capacity is [8, 9], by rank"):
            compiled(x, **mine)
        assert_equal(calls(ring), before, "calls launched by refused ones")
        both_ways(comm, KNOWN, torch.float32, ring_id=101)


def test_only_rows_that_exist_are_sent() -> None:
    """Wrong counts reach no row outside of x, whatever their signs and their sums are."""
    for counts in ([3, -5, 6, 0], [2**62, 2**62, 2**62, 2**62], [7, 0, 0, 1], [1, 2, 2, 1]):
        sent = torch.tensor([counts, [0, 1, 0, 0]])
        rows = sendable(sent, torch.tensor([[6], [1]]))
        assert_equal(int(rows.min()) >= 0, True, f"{counts} become {rows.tolist()}")
        assert_equal(rows.sum(1).tolist(), [6, 1], f"{counts} become {rows.tolist()}")


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    x = inputs(KNOWN, 8, torch.float32)[comm.rank].to(comm.device)
    mine = own_counts(comm, KNOWN, comm.device)
    local, expected = mine.values()
    for call, name in ((ops.global_scatter, "global_scatter"), (ops.global_gather, "global_gath")):
        for capacity in (0, -1, True, 2.5):
            with raises(ArgumentError, name, f"capacity={capacity!r}", "a whole number >= 1"):
                call(x, local, expected, capacity=capacity)
        with raises(DtypeError, name, "x is torch.int32", "pass x.float()"):
            call(x.int(), local, expected, capacity=9)
        with raises(ShapeError, name, "[", "width]"):
            call(x[0], local, expected, capacity=9)
        with raises(DtypeError, name, "pass local_count.long()"):
            call(x, local.int(), expected, capacity=9)
        with raises(ShapeError, "local_count has 4 entries, global_count 2"):
            call(x, local, expected[:2], capacity=9)
        with raises(ArgumentError, "global_count is list"):
            call(x, local, [1, 2, 3, 0], capacity=9)
        with raises(DeviceError, "meta"):
            call(x.to("meta"), local, expected, capacity=9)
        if on_gpu(comm):
            with raises(DeviceError, "local_count is on cpu"):
                call(x, local.cpu(), expected, capacity=9)
    before = calls(comm)
    for call, name in ((ops.global_scatter, "global_scatter"), (ops.global_gather, "global_gath")):
        for capacity in (2**30, 2**62):
            words = f"rank {comm.rank} of 2", f"capacity={capacity} makes", "at most 1073741823"
            for error, way in ((ArgumentError, call), (TorchRuntimeError, compile_whole(call))):
                with raises(error, name, "on ring 0", *words, "pass a smaller capacity"):
                    way(x, local, expected, capacity=capacity)
    assert_equal(calls(comm), before, "calls launched by refused ones")
    with raises(ShapeError, "(0, 8)", "[capacity of global_scatter, width]"):
        ops.global_gather(x[:0], local, expected, capacity=9)


@runs_on("ranks")
def test_tables_without_memory(comm: Any) -> None:
    """A capacity within the limit may still be more than the device has memory for."""
    for back, name, rows in ((False, "global_scatter", 9), (True, "global_gather", 7)):
        words = "on ring 0", f"the tables of capacity={rows} can't be allocated on {comm.device}"
        refused = raises(ArgumentError, name, *words, "pass a smaller capacity")
        with refused, enough_memory(comm, partial(tables_needed, comm, rows, back)):
            torch.empty(2**60, dtype=torch.uint8, device=comm.device)
        with raises(RuntimeError, "size of tensor"), enough_memory(comm, error_of_tables):
            torch.ones(2, device=comm.device) + torch.ones(3, device=comm.device)


def error_of_tables() -> Any:
    raise AssertionError("no memory is missing")


@runs_on("ranks")
def test_rows_without_memory(comm: Any) -> None:
    """The error names the program's call and its capacity, and the ring stays usable."""
    x = torch.ones((6, 1), device=comm.device).expand(-1, 2**15)
    mine, capacity = own_counts(comm, KNOWN, comm.device), 2**22
    for call, name in ((ops.global_scatter, "global_scatter"), (ops.global_gather, "global_gath")):
        words = f"capacity={capacity} needs", f"bytes on {comm.device}", "for rows of width 32768"
        with raises(ArgumentError, name, *words, "largest number of rows that a rank gets"):
            call(x, **mine, capacity=capacity)
        reported(comm)
    both_ways(comm, KNOWN, torch.float32)
