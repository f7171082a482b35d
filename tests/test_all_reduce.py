"""ops.all_reduce: every rank gets the reduction of all ranks' tensors."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

import commlib
from commlib import ops
from commlib.errors import ArgumentError, DtypeError
from tests.support.checks import (
    FP8,
    INTEGERS,
    SHORT,
    UNSIGNED,
    assert_bits_equal,
    assert_equal,
    raises,
    rounded,
    sample,
    wide,
)
from tests.support.formulas import AVERAGED, REAL, SUMMED, largest, mean, product, smallest, total
from tests.support.operator import MODES, Operator, calls, compile_whole
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on
from tests.support.suites import suite_of

# Any: the tests also pass arguments that a type checker rejects.
all_reduce: Any = ops.all_reduce

reduction = functools.partial(Operator, ops.all_reduce, reduces=True, in_place=True)
SUM = reduction(total, adjoint=total, dtypes=SUMMED)
OTHERS = {
    "max": reduction(largest, keywords={"op": "max"}, dtypes=(*REAL, torch.bool)),
    "min": reduction(smallest, keywords={"op": "min"}, dtypes=(*REAL, torch.bool)),
    "prod": reduction(product, keywords={"op": "prod"}, dtypes=(*REAL, torch.bool)),
    "avg": reduction(mean, keywords={"op": "avg"}, adjoint=mean, dtypes=AVERAGED),
}
# (operation, dtype, a word of the reason)
REFUSED = [
    *(("sum", dtype, "torch.int32") for dtype in SHORT),
    *((op, dtype, "torch.bfloat16") for dtype in FP8 for op in ("sum", "max")),
    ("avg", torch.bool, "float"),
    ("max", torch.complex64, "complex"),
    ("prod", torch.complex64, "complex"),
]


test_suite = suite_of(SUM, **OTHERS)


@runs_on("ranks")
def test_refused_reductions(comm: Any) -> None:
    before = calls(comm)
    for op, dtype, word in REFUSED:
        x = sample(comm.rank, (4,), dtype).to(comm.device)
        with raises(DtypeError, op, dtype, word, "ring 0", f"rank {comm.rank}"):
            all_reduce(x, op=op)
    x = sample(comm.rank, (4,), torch.float32).to(comm.device)
    with raises(ArgumentError, "mean", "avg"):
        all_reduce(x, op="mean")
    with raises(ArgumentError, "factor=2.0", "premul_sum"):
        all_reduce(x, factor=2.0)
    with raises(ArgumentError, "premul_sum", "pass factor="):
        all_reduce(x, op="premul_sum")
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_premul_sum(comm: Any) -> None:
    """Each rank's tensor is multiplied, then added; the gradient is the same reduction."""
    mine, other = (sample(rank, (5, 3), torch.float32) for rank in (comm.rank, 1 - comm.rank))
    x = mine.to(comm.device).requires_grad_()
    actual = all_reduce(x, op="premul_sum", factor=0.5)
    assert_bits_equal(actual.detach(), wide(mine) * 0.5 + wide(other) * 0.5, "premul_sum")
    actual.backward(torch.ones_like(actual))
    assert_bits_equal(x.grad, torch.ones(5, 3), "gradient")
    fast = compile_whole(all_reduce)
    compiled = fast(mine.to(comm.device), op="premul_sum", factor=0.5)
    assert_bits_equal(compiled, actual.detach().cpu(), "compiled")


@runs_on("ranks")
def test_unsigned(comm: Any) -> None:
    """Compared as signed numbers the largest would come out smallest: exact, or refused."""
    for dtype in (torch.uint32, torch.uint64):
        both = [sample(rank, (64,), dtype) for rank in range(2)]
        for op, formula in (("max", largest), ("min", smallest), ("prod", product)):
            x = both[comm.rank].to(comm.device)
            if op != "prod" and comm.engine != "nccl":
                with raises(DtypeError, op, "torch.int64"):
                    all_reduce(x, op=op)
            else:
                want = formula([wide(x) for x in both], 0)
                assert_bits_equal(all_reduce(x, op=op), want, f"{dtype} {op}")


def mean_of_integers(comm: Any, dtype: torch.dtype) -> None:
    """The sum wraps around in the dtype, as NCCL's does, and is then rounded towards zero."""
    info = torch.iinfo(dtype)
    ends = [info.min, info.max, 1, 0, info.max // 2 + 1, info.min // 2, 7, info.max - 2]
    values = np.resize(np.array(ends, str(dtype).removeprefix("torch.")), 8 * comm.size)
    arrays = [np.roll(values, -rank) for rank in range(comm.size)]
    x, want = rounded(arrays[comm.rank], dtype).to(comm.device), mean(arrays, 0)
    for mode in MODES.values():
        actual = all_reduce(x, op="avg", **mode)
        actual = actual.wait() if mode is MODES["async"] else actual
        assert_bits_equal(actual, want, f"all_reduce of {dtype}")
    part = ops.reduce_scatter(x, op="avg")
    shard = slice(8 * comm.rank, 8 * comm.rank + 8)
    assert_bits_equal(part, want[shard], f"reduce_scatter of {dtype}")
    reduced = ops.reduce(x, root=0, op="avg")
    if comm.rank == 0:
        assert_bits_equal(reduced, want, f"reduce of {dtype}")


@pytest.mark.parametrize("dtype", [*INTEGERS, *UNSIGNED], ids=str)
def test_mean_of_integers(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks(mean_of_integers, dtype)


@pytest.mark.parametrize("dtype", [*INTEGERS, *UNSIGNED], ids=str)
def test_mean_of_integers_of_more_ranks(many_ranks: Ranks, dtype: torch.dtype) -> None:
    """Three ranks also divide by a number that is not a power of two."""
    many_ranks(mean_of_integers, dtype)


@runs_on("ranks")
def test_mean_of_integers_in_a_group(comm: Any) -> None:
    """It is divided after the launches of a group, which may have messages too."""
    for dtype in (torch.int32, *UNSIGNED):
        both = [sample(rank, (64,), dtype) for rank in range(2)]
        x, taken = both[comm.rank].to(comm.device), torch.empty_like(both[0], device=comm.device)
        out = torch.empty_like(x)
        with comm.group():
            comm.send(x, peer=1 - comm.rank)
            comm.all_reduce(out, x, op="avg")
            comm.recv(taken, peer=1 - comm.rank)
        assert_bits_equal(out, mean([wide(one) for one in both], 0), f"mean of {dtype}")
        assert_bits_equal(taken, both[1 - comm.rank], f"received {dtype}")


@runs_on("ranks")
def test_mean_of_integers_of_one_rank(comm: Any) -> None:
    alone = commlib.new_ring(40 + comm.rank, [comm.rank])
    assert alone is not None
    x = torch.tensor([-7, 7], device=comm.device)
    assert_bits_equal(alone.all_reduce(x, op="avg"), np.array([-7, 7]), "one rank")
    commlib.close_ring(alone.ring_id)


@runs_on("ranks")
def test_large(comm: Any) -> None:
    """More elements than any library moves in one piece, an odd number of them."""
    for dtype in (torch.float32, torch.bfloat16):
        both = [sample(rank, (3_000_001,), dtype) for rank in range(2)]
        for mode in MODES.values():
            assert_bits_equal(
                SUM(both[comm.rank].to(comm.device), **mode), total([wide(x) for x in both], 0)
            )


@runs_on("ranks")
def test_backward_identity(comm: Any) -> None:
    """backward="identity": the loss is computed by every rank, so its gradient is not summed."""
    x = sample(comm.rank, (3,), torch.float64).to(comm.device).requires_grad_()
    weights = sample(7, (3,), torch.float64).to(comm.device)
    before = calls(comm)
    all_reduce(x, backward="identity").backward(weights)
    assert_bits_equal(x.grad, wide(weights), "gradient")
    assert_equal(calls(comm) - before, 1, "collectives of forward and backward")
    with raises(ArgumentError, "no gradient", "max"):
        all_reduce(x, op="max").sum().backward()
    with raises(ArgumentError, "mean", "identity"):
        all_reduce(x, backward="mean").sum().backward()


@runs_on("ranks")
def test_gradcheck(comm: Any) -> None:
    """Both ranks perturb the same element; the map is symmetric, so gradcheck applies."""
    x = sample(comm.rank, (2, 3), torch.float64).to(comm.device).requires_grad_()
    for op in ("sum", "avg"):
        call = functools.partial(ops.all_reduce, op=op)
        assert_equal(torch.autograd.gradcheck(call, x), True, f"gradcheck of {op}")
