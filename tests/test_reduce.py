"""ops.reduce: the root gets the reduction, the others keep what they had."""

import functools
from typing import Any

import torch

from commlib import ops
from commlib.errors import DtypeError
from tests.support.checks import Array, raises
from tests.support.formulas import (
    AVERAGED,
    REAL,
    ROOT,
    SUMMED,
    largest,
    mean,
    product,
    smallest,
    total,
)
from tests.support.operator import Operator
from tests.support.runs_on import runs_on
from tests.support.suites import suite_of, wrong_roots


def at_root(formula: Any, inputs: list[Array], rank: int) -> Array:
    return formula(inputs, rank) if rank == ROOT else inputs[rank]


def reduction(formula: Any, dtypes: tuple[torch.dtype, ...], op: str = "sum") -> Operator:
    return Operator(
        ops.reduce,
        functools.partial(at_root, formula),
        keywords={"root": ROOT, "op": op},
        dtypes=dtypes,
        reduces=True,
        in_place=True,
        only_root=True,
    )


SUM = reduction(total, SUMMED)
OTHERS = {
    "max": reduction(largest, (*REAL, torch.bool), "max"),
    "min": reduction(smallest, (*REAL, torch.bool), "min"),
    "prod": reduction(product, (*REAL, torch.bool), "prod"),
    "avg": reduction(mean, AVERAGED, "avg"),
}


test_suite = suite_of(SUM, wrong_roots, **OTHERS)


@runs_on("ranks")
def test_refused_dtype(comm: Any) -> None:
    """Every rank refuses what can't be reduced, not the root alone."""
    with raises(DtypeError, "uint16", "torch.int32"):
        ops.reduce(torch.zeros(4, dtype=torch.uint16, device=comm.device))
