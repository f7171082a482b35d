"""ops.scatter: rank r gets the r-th part of the root's tensor."""

from commlib import ops
from tests.support.formulas import ROOT, own_part_from_root
from tests.support.operator import Operator
from tests.support.suites import suite_of, wrong_roots

SCATTER = Operator(ops.scatter, own_part_from_root, keywords={"root": ROOT}, divides=True)


test_suite = suite_of(SCATTER, wrong_roots)
