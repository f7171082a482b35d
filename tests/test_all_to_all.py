"""ops.all_to_all: rank r gets the r-th part of every rank's tensor."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import commlib
from commlib import ops
from commlib.errors import ArgumentError, ShapeError
from tests.support.checks import (
    Array,
    assert_bits_equal,
    assert_equal,
    bits,
    from_bits,
    raises,
    sample,
    wide,
)
from tests.support.examples import examples
from tests.support.formulas import parts_for_rank
from tests.support.operator import MODES, Operator, calls, compile_whole
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on
from tests.support.suites import suite_of

# Any: the tests also pass arguments that a type checker rejects.
all_to_all: Any = ops.all_to_all

EXCHANGE = Operator(ops.all_to_all, parts_for_rank, adjoint=parts_for_rank, divides=True)
Counts = list[list[int]]  # counts[i][j] rows go from rank i to rank j


test_suite = suite_of(EXCHANGE)


def column(counts: Counts, rank: int) -> list[int]:
    return [row[rank] for row in counts]


def sent_to(rank: int, arrays: list[Array], counts: Counts) -> list[Array]:
    """Return what every rank has for ``rank``, by the definition of the splits."""
    starts = [sum(row[:rank]) for row in counts]
    return [x[a : a + row[rank]] for x, a, row in zip(arrays, starts, counts, strict=True)]


def joined_rows(parts: list[Array], like: Array) -> Array:
    return np.concatenate([like[:0], *parts])


def split_values(comm: Any, counts: Counts) -> None:
    """Values, gradients and the way back, for any rows from any rank to any other."""
    splits = {"in_splits": counts[comm.rank], "out_splits": column(counts, comm.rank)}
    for dtype in (torch.float64, torch.bool, torch.complex128, torch.float8_e5m2):
        every = [sample(r, (sum(row), 3), dtype) for r, row in enumerate(counts)]
        arrays = [bits(x) for x in every]
        want = from_bits(joined_rows(sent_to(comm.rank, arrays, counts), arrays[0]), dtype)
        for mode in MODES.values():
            assert_bits_equal(
                EXCHANGE(every[comm.rank].to(comm.device), **splits, **mode), want, counts
            )
    sent = sample(comm.rank, (sum(counts[comm.rank]), 3), torch.float64).to(comm.device)
    out = all_to_all(sent.requires_grad_(), **splits)
    out.backward(out.detach())
    assert_bits_equal(sent.grad, sent, "what came, sent back")


row_counts = st.integers(0, 5)


@examples(40)
@given(counts=st.lists(st.lists(row_counts, min_size=2, max_size=2), min_size=2, max_size=2))
def test_any_splits(ranks: Ranks, counts: Counts) -> None:
    ranks(split_values, counts)


def test_splits_on_three_ranks(three_ranks: Ranks) -> None:
    three_ranks(split_values, [[2, 0, 1], [0, 0, 4], [3, 1, 0]])
    three_ranks(split_values, [[0, 0, 0], [0, 0, 0], [0, 7, 0]])


@runs_on("ranks")
def test_splits_on_one_side(comm: Any) -> None:
    """Splits on one side alone: the other side is equal parts, also for the gradient."""
    counts = [[1, 1], [3, 3]]
    x = sample(comm.rank, (sum(counts[comm.rank]), 2), torch.float64).to(comm.device)
    arrays = [wide(sample(r, (sum(row), 2), torch.float64)) for r, row in enumerate(counts)]
    want = joined_rows(sent_to(comm.rank, arrays, counts), arrays[0])
    # Rank 0 takes 1 + 3 rows, its own and its peer's: out_splits says so, in_splits is the default.
    out = all_to_all(x.requires_grad_(), out_splits=column(counts, comm.rank))
    assert_bits_equal(out, want, "out_splits alone")
    out.backward(out.detach())
    assert_bits_equal(x.grad, x, "gradient of out_splits alone")


@runs_on("ranks")
def test_splits_that_are_read_once_and_those_that_are_left_away(comm: Any) -> None:
    x = torch.arange(4.0, device=comm.device)
    expected = all_to_all(x)
    once: Any = iter([2, 2])
    assert_bits_equal(comm.all_to_all(x, in_splits=[2, 2]), expected, "in_splits alone")
    assert_bits_equal(ops.all_to_all(x, out_splits=once), expected, "an iterator")


@runs_on("ranks")
def test_wrong_splits(comm: Any) -> None:
    x = torch.zeros(4, 3, device=comm.device)
    before = calls(comm)
    even = [2, 2]
    with raises(ShapeError, "in_splits=[1, 2]", "4 rows", "add up to 3"):
        all_to_all(x, in_splits=[1, 2], out_splits=even)
    with raises(ShapeError, "in_splits=[5, -1]"):
        all_to_all(x, in_splits=[5, -1], out_splits=even)
    wrong: Any
    for wrong in ([4], [1.5, 2.5], [2, 2**70], 4, ["2", "2"]):
        with raises(ShapeError, f"in_splits={wrong}", "a list of 2 whole numbers"):
            all_to_all(x, in_splits=wrong, out_splits=even)
        with raises(ShapeError, "all_to_all on ring 0", f"out_splits={wrong}"):
            ops.all_to_all(x, in_splits=even, out_splits=wrong)
        with raises(ShapeError, "all_to_all on ring 0", f"out_splits={wrong}"):
            comm.all_to_all(x, in_splits=even, out_splits=wrong)
        with raises(ShapeError, "all_to_all on ring 0", f"out_splits={wrong}"):
            ops.all_to_all(x.clone().requires_grad_(), in_splits=even, out_splits=wrong)
    with raises(ShapeError, "out_splits=[2, 2]", "5 rows"):
        all_to_all(x, in_splits=even, out_splits=even, out=x.new_empty(5, 3))
    itself = [3, 1] if comm.rank == 0 else [1, 3]
    with raises(ShapeError, "itself", 6, 9):
        all_to_all(x, in_splits=even, out_splits=itself)
    with raises(ShapeError, "(3, 3)", "size 2"):
        all_to_all(x[:3])
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_compiled_splits(comm: Any) -> None:
    """One graph for any number of rows: splits and shapes may change between calls."""
    graph = compile_whole(ops.all_to_all, dynamic=True)
    for counts in ([[2, 1], [0, 3]], [[4, 2], [1, 1]], [[3, 5], [2, 6]]):
        x = sample(comm.rank, (sum(counts[comm.rank]), 3), torch.float64).to(comm.device)
        splits = {"in_splits": counts[comm.rank], "out_splits": column(counts, comm.rank)}
        assert_bits_equal(graph(x, **splits), all_to_all(x, **splits), counts)


@runs_on("cpu_ranks")
def test_splits_of_a_trace_stay_symbols(comm: Any) -> None:
    one = commlib.new_ring(50 + comm.rank, [comm.rank])
    assert one is not None

    def call(x: torch.Tensor) -> torch.Tensor:
        rows = [x.shape[0]]
        return ops.all_to_all(x, one, out_splits=rows, in_splits=rows)

    traced = make_fx(call, tracing_mode="symbolic")(torch.ones(4, 2))
    x = torch.arange(12.0).view(6, 2)
    assert_bits_equal(traced(x), x, "other rows than in the trace")
    outs, xs = [torch.zeros(2)], [torch.ones(2)]
    splits: Any = np.array([2])
    refused: Any = one.all_to_all
    with raises(ArgumentError, "with lists of tensors", "leave them away"):
        refused(outs, xs, in_splits=splits)
    one.close()
