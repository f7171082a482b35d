"""ops.gather: the root gets all tensors one after the other, the others nothing."""

from commlib import ops
from tests.support.formulas import ROOT, joined_at_root
from tests.support.operator import Operator
from tests.support.suites import suite_of, wrong_roots

GATHER = Operator(ops.gather, joined_at_root, keywords={"root": ROOT}, only_root=True)


test_suite = suite_of(GATHER, wrong_roots)
