"""Means of unsigned integers: the division after a sum, and the calls that need it."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commlib.engines.c10d.engine import C10dEngine
from commlib.engines.c10d.plans import plan_of
from commlib.engines.local import divide
from commlib.engines.reductions import resolve_reduction
from tests.support.checks import UNSIGNED, assert_bits_equal


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
@pytest.mark.parametrize("size", [2, 3, 5, 8, 1000])
def test_quotients(dtype: torch.dtype, size: int) -> None:
    """Those of numbers on both sides of the sign bit are NumPy's."""
    kind, largest = str(dtype).removeprefix("torch."), torch.iinfo(dtype).max
    half = largest // 2
    ends = [0, 1, size - 1, size, half - 1, half, half + 1, half + 2, largest - 1, largest]
    drawn = np.random.default_rng(size).integers(0, largest, 1000, kind, endpoint=True)
    values = np.concatenate([np.array(ends, kind), drawn])
    sums = torch.from_numpy(values.copy())
    divide(sums, size)
    assert_bits_equal(sums, values // np.array(size, kind))


@pytest.mark.parametrize("dtype", [*UNSIGNED, torch.int32], ids=str)
@pytest.mark.parametrize("on_host", [True, False])
def test_plans(dtype: torch.dtype, on_host: bool) -> None:
    """NCCL in torch.distributed gets a sum of unsigned numbers, and a mean of signed ones."""
    plan = plan_of(dtype, resolve_reduction(dtype, "avg", C10dEngine.reducer), on_host=on_host)
    assert plan.divides == (on_host or dtype in UNSIGNED)
    assert plan.op == (dist.ReduceOp.SUM if plan.divides else dist.ReduceOp.AVG)
