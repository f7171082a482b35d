"""ops.gather: the root gets all tensors one after the other, the others nothing."""

from typing import Any

import pytest

from commlib import ops
from tests._formulas import ROOT, joined_at_root
from tests._ranks import Ranks
from tests._suites import SUITES, Operator, wrong_roots

GATHER = Operator(ops.gather, joined_at_root, keywords={"root": ROOT}, only_root=True)


@pytest.mark.parametrize("suite", [*SUITES, wrong_roots])
def test_suite(ranks: Ranks, suite: Any) -> None:
    ranks(suite, GATHER)
