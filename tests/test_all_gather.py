"""ops.all_gather: every rank gets all ranks' tensors one after the other."""

from typing import Any

import torch

from commlib import ops
from tests.support.checks import MOVABLE, assert_bits_equal, bits, from_bits, sample
from tests.support.formulas import joined, own_part_of_total
from tests.support.operator import MODES, Operator
from tests.support.runs_on import runs_on
from tests.support.suites import suite_of

GATHER = Operator(ops.all_gather, joined, adjoint=own_part_of_total)


test_suite = suite_of(GATHER)


@runs_on("ranks")
def test_input_inside_output(comm: Any) -> None:
    """The input may be this rank's own part of the output."""
    for dtype in MOVABLE:
        both = [sample(rank, (3, 5), dtype) for rank in range(2)]
        for name, mode in MODES.items():
            out = torch.zeros(6, 5, dtype=dtype, device=comm.device)
            mine = out[3 * comm.rank : 3 * comm.rank + 3].copy_(both[comm.rank])
            actual = GATHER(mine, out=out, **mode)
            assert_bits_equal(
                actual, from_bits(joined([bits(x) for x in both], 0), dtype), f"{dtype} {name}"
            )


@runs_on("ranks")
def test_scalars(comm: Any) -> None:
    x = torch.tensor(float(comm.rank + 1), device=comm.device, requires_grad=True)
    gathered = ops.all_gather(x)
    assert_bits_equal(gathered, torch.tensor([1.0, 2.0]), "0-D inputs")
    (gathered * torch.tensor([3.0, 5.0], device=comm.device)).sum().backward()
    assert_bits_equal(x.grad, torch.tensor([6.0, 10.0][comm.rank]), "gradient")


@runs_on("ranks")
def test_one_element_with_any_stride(comm: Any) -> None:
    """A tensor of one element is dense, whatever its stride is."""
    for dtype in MOVABLE:
        both = [sample(rank, (1, 8), dtype) for rank in range(2)]
        actual = ops.all_gather(both[comm.rank].to(comm.device)[:, 3])
        expected = from_bits(joined([bits(x)[:, 3] for x in both], 0), dtype)
        assert_bits_equal(actual, expected, f"{dtype}")
