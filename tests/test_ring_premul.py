"""premul_sum: each rank's tensor is multiplied in its dtype, then added, on every engine.

NCCL multiplies and adds in one step on GPUs, without the rounding between them. There a sum may be
one rounding of the product away.
"""

from typing import Any, cast

import numpy as np
import torch

import commlib
from commlib.errors import ArgumentError, DtypeError
from tests.support.checks import (
    FLOATS,
    assert_bits_equal,
    assert_equal,
    raises,
    rounded,
    sample,
    wide,
)
from tests.support.runs_on import runs_on

FACTOR = 0.1  # which no float represents: its rounding counts


def products(shape: tuple[int, ...], dtype: torch.dtype, size: int) -> list[Any]:
    """Return what every rank adds: products of values that are rounded to the dtype."""
    factor = wide(rounded(np.array(FACTOR), dtype))
    values = (wide(sample(rank, shape, dtype)) for rank in range(size))
    return [wide(rounded(value * factor, dtype)) for value in values]


def one_rounding(ring: Any, dtype: torch.dtype) -> float:
    """Return what NCCL's fused step may be apart; products are below 1 here."""
    return float(torch.finfo(dtype).eps) if ring.engine == "nccl" else 0.0


@runs_on("ranks")
def test_values(ring: Any) -> None:
    for dtype in FLOATS:
        apart = one_rounding(ring, dtype)
        mine = sample(ring.rank, (6, 5), dtype).to(ring.device)
        total = rounded(sum(products((6, 5), dtype, ring.size)), dtype)
        kwargs = {"op": "premul_sum", "factor": FACTOR}
        for later in ({}, {"use_calc_stream": False, "sync_op": False}):
            out = [torch.full_like(mine, 7.0) for _ in range(2)]
            part = torch.full_like(mine[:3], 7.0)
            works = [
                ring.all_reduce(out[0], mine, **kwargs, **later),
                ring.reduce(out[1], mine, root=1, **kwargs, **later),
                ring.reduce_scatter(part, mine, **kwargs, **later),
            ]
            results = [work.wait() if later else work for work in works]
            assert_equal([a is b for a, b in zip(results, [*out, part], strict=True)], [True] * 3)
            assert_bits_equal(out[0].cpu(), total, f"all_reduce {dtype} {later}", atol=apart)
            expected = total if ring.rank == 1 else torch.full_like(total, 7.0)
            assert_bits_equal(out[1].cpu(), expected, f"reduce {dtype} {later}", atol=apart)
            shard = total[3 * ring.rank : 3 * ring.rank + 3]
            assert_bits_equal(part.cpu(), shard, f"reduce_scatter {dtype} {later}", atol=apart)
        assert_bits_equal(mine.cpu(), sample(ring.rank, (6, 5), dtype), "the input")
        actual = ring.all_reduce(mine, mine, **kwargs)
        assert_bits_equal(actual.cpu(), total, "in place", atol=apart)


@runs_on("ranks")
def test_grouped_and_uneven(ring: Any) -> None:
    shapes = [(3,), (2, 2)]
    inputs = [sample(ring.rank, shape, torch.float32).to(ring.device) for shape in shapes]
    sums = [rounded(sum(products(s, torch.float32, ring.size)), torch.float32) for s in shapes]
    outs = [torch.empty_like(x) for x in inputs]
    with ring.group():
        for out, x in zip(outs, inputs, strict=True):
            ring.all_reduce(out, x, op="premul_sum", factor=FACTOR)
    for out, expected in zip(outs, sums, strict=True):
        apart = one_rounding(ring, torch.float32)
        assert_bits_equal(out.cpu(), expected, "in a group", atol=apart)
    out = torch.empty_like(inputs[ring.rank])
    ring.reduce_scatter_v(out, inputs, op="premul_sum", factor=FACTOR)
    assert_bits_equal(out.cpu(), sums[ring.rank], "reduce_scatter_v", atol=apart)


@runs_on("ranks")
def test_a_ring_of_one_rounds_the_factor_too(ring: Any) -> None:
    alone = commlib.new_ring(310, [ring.rank])
    assert alone is not None
    x = sample(ring.rank, (4,), torch.bfloat16).to(ring.device)
    expected = rounded(products((4,), torch.bfloat16, ring.size)[ring.rank], torch.bfloat16)
    for call in (alone.all_reduce, alone.reduce_scatter):
        actual = call(x, op="premul_sum", factor=FACTOR)
        assert_bits_equal(actual.cpu(), expected, call.__name__)
    commlib.close_ring(310)


@runs_on("ranks")
def test_bad_input(ring: Any) -> None:
    x = torch.ones(4, device=ring.device)
    calls: list[Any] = [
        lambda **given: ring.reduce(x, x, root=0, **given),
        lambda **given: ring.reduce_scatter(x[:2].clone(), x, **given),
    ]
    for call in calls:
        with raises(ArgumentError, "premul_sum", "pass factor="):
            call(op="premul_sum")
        with raises(ArgumentError, "factor=2.0", "premul_sum"):
            call(factor=2.0)
    alone = commlib.new_ring(311, [ring.rank])
    assert alone is not None
    for factor in ("2", [1], 1j, torch.ones(2), 10**400):
        for one in (ring, alone):
            with raises(ArgumentError, f"all_reduce on ring {one.ring_id}", "expected a number"):
                one.all_reduce(x, op="premul_sum", factor=cast(Any, factor))
    alone.barrier()
    commlib.close_ring(311)
    with raises(DtypeError, "floating-point", "op='sum'"):
        ring.all_reduce(x.int(), op="premul_sum", factor=0.5)
    ring.barrier()


@runs_on("ranks")
def test_outputs_of_another_shape(ring: Any) -> None:
    """Elements count, not shapes: an engine copies them in their order."""
    x = torch.arange(6.0, device=ring.device).reshape(2, 3)
    for op, factor in (("sum", None), ("premul_sum", 0.5)):
        expected = torch.arange(6.0) * ring.size * (factor or 1.0)
        kwargs = {"op": op, "factor": factor}
        assert_bits_equal(ring.all_reduce(x.new_empty(6), x, **kwargs).cpu(), expected, op)
        out = ring.reduce(x.new_empty(6), x, root=0, **kwargs)
        if ring.rank == 0:
            assert_bits_equal(out.cpu(), expected, op)
    out = ring.broadcast(x.new_empty(6), x, root=1)
    assert_bits_equal(out.cpu(), torch.arange(6.0), "broadcast")
