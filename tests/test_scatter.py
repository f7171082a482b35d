"""ops.scatter: rank r gets the r-th part of the root's tensor."""

from typing import Any

import pytest

from commlib import ops
from tests.support.formulas import ROOT, own_part_from_root
from tests.support.operator import Operator
from tests.support.ranks import Ranks
from tests.support.suites import cases, wrong_roots

SCATTER = Operator(ops.scatter, own_part_from_root, keywords={"root": ROOT}, divides=True)


@pytest.mark.parametrize(("suite", "op"), cases(SCATTER, wrong_roots))
def test_suite(ranks: Ranks, suite: Any, op: Operator) -> None:
    ranks(suite, op)
