"""ops.identity: a copy whose gradient is summed over the ring."""

import functools
from typing import Any

import torch

from commlib import ops
from commlib.errors import RingError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.formulas import own, total
from tests.support.operator import ABSENT_RING, Operator, calls
from tests.support.runs_on import runs_on
from tests.support.suites import compiled, gradients, lazy_bits, suite_of, values

IDENTITY = Operator(ops.identity, own, adjoint=total, modes=("calc", "comm"))


test_suite = suite_of(IDENTITY, only=(values, lazy_bits, compiled, gradients))


@runs_on("ranks")
def test_copy(comm: Any) -> None:
    """A fresh, dense tensor, without communication forward."""
    x = torch.arange(6.0, device=comm.device).view(2, 3).t()
    before = calls(comm)
    result = ops.identity(x)
    assert_equal(calls(comm), before, "collectives of the forward")
    assert_equal(result.is_contiguous(), True, "dense")
    result.zero_()
    assert_bits_equal(x, torch.arange(6.0).view(2, 3).t(), "input after writing to the copy")
    with raises(RingError, ABSENT_RING):
        ops.identity(x, ABSENT_RING)


@runs_on("ranks")
def test_tensor_parallel_pair(comm: Any) -> None:
    """Identity, shard, all_reduce: output and gradients of the whole layer on every rank.

    Integers in floats, so that the order of the sums does not count.
    """
    wide = torch.arange(12.0, dtype=torch.float64, device=comm.device).view(3, 4)
    x = torch.arange(6.0, dtype=torch.float64, device=comm.device).view(2, 3)
    tall = wide.t() + 1
    first, second = wide.chunk(2, 1)[comm.rank], tall.chunk(2, 0)[comm.rank]
    leaf = x.clone().requires_grad_()
    hidden = ops.identity(leaf) @ first
    out = ops.all_reduce(hidden @ second, backward="identity")
    out.sum().backward()

    reference = x.clone().requires_grad_()
    want = functools.reduce(torch.matmul, (reference, wide, tall))
    want.sum().backward()
    assert_bits_equal(out, want.detach(), "output")
    assert_bits_equal(leaf.grad, reference.grad, "gradient")
