"""ops.gather: the root gets all tensors one after the other, the others nothing."""

from typing import Any

import pytest

from commlib import ops
from tests.support.formulas import ROOT, joined_at_root
from tests.support.operator import Operator
from tests.support.ranks import Ranks
from tests.support.suites import cases, wrong_roots

GATHER = Operator(ops.gather, joined_at_root, keywords={"root": ROOT}, only_root=True)


@pytest.mark.parametrize(("suite", "op"), cases(GATHER, wrong_roots))
def test_suite(ranks: Ranks, suite: Any, op: Operator) -> None:
    ranks(suite, op)
