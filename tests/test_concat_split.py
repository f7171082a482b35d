"""ops.concat and ops.split: shards of the last axis put together, and taken apart."""

from typing import Any

import pytest
import torch

from commlib import ops
from commlib.errors import DeviceError, RingError, ShapeError
from tests.support.checks import Shape, assert_bits_equal, assert_equal, raises, sample
from tests.support.formulas import own_columns, side_by_side
from tests.support.operator import ABSENT_RING, Operator, calls
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on
from tests.support.suites import compiled, gradients, lazy_bits, values


class LastAxis(Operator):
    """An operator on the last axis, which has even length and is there."""

    def shapes(self, size: int) -> list[Shape]:
        return [(5, 2 * size), (size,), (0,), (0, 3 * size), (3, 0), (2, 3, size)]


# The gradient of concat is the own part: every rank computes the same loss.
CONCAT = LastAxis(ops.concat, side_by_side, adjoint=own_columns, modes=("calc", "comm"))
SPLIT = LastAxis(ops.split, own_columns, adjoint=side_by_side, modes=("calc", "comm"))


@pytest.mark.parametrize("op", [CONCAT, SPLIT], ids=["concat", "split"])
@pytest.mark.parametrize("suite", [values, lazy_bits, compiled, gradients])
def test_suite(ranks: Ranks, suite: Any, op: Operator) -> None:
    ranks(suite, op)


@runs_on("ranks")
def test_inverse(comm: Any) -> None:
    """Each undoes the other, values and gradients."""
    x = sample(5, (3, 4), torch.float64).to(comm.device).requires_grad_()
    back = ops.concat(ops.split(x))
    assert_bits_equal(back, x, "concat of split")
    weights = sample(6, (3, 4), torch.float64).to(comm.device)
    back.backward(weights)
    assert_bits_equal(x.grad, weights, "gradient")


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    x = torch.zeros(2, 3, device=comm.device)
    before = calls(comm)
    with raises(ShapeError, "(2, 3)", "size 2", f"rank {comm.rank}"):
        ops.split(x)
    for call in (ops.concat, ops.split):
        with raises(ShapeError, call.__name__):
            call(torch.zeros((), device=comm.device))
        with raises(RingError, ABSENT_RING):
            call(x, ABSENT_RING)
    with raises(DeviceError, "meta"):
        ops.concat(x.to("meta"))
    assert_equal(calls(comm), before, "calls launched by refused ones")
    assert_equal(ops.split(x[:, :2]).is_contiguous(), True, "split is dense")
