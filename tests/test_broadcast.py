"""ops.broadcast: every rank gets the root's tensor."""

from typing import Any

import torch

from commlib import ops
from tests.support.checks import assert_bits_equal
from tests.support.formulas import ROOT, from_root, total_or_zeros
from tests.support.operator import Operator
from tests.support.runs_on import runs_on
from tests.support.suites import suite_of, wrong_roots

BROADCAST = Operator(
    ops.broadcast, from_root, adjoint=total_or_zeros, keywords={"root": ROOT}, in_place=True
)


test_suite = suite_of(BROADCAST, wrong_roots)


@runs_on("ranks")
def test_default_root(comm: Any) -> None:
    x = torch.full((3,), comm.rank + 5.0, device=comm.device)
    assert_bits_equal(ops.broadcast(x), torch.full((3,), 5.0), "the default root is 0")
    assert_bits_equal(x, torch.full((3,), comm.rank + 5.0), "input afterwards")
