"""ops.all_reduce: every rank gets the reduction of all ranks' tensors."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from commlib import ops
from commlib.errors import ArgumentError, DtypeError
from tests._check import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    UNSIGNED,
    Array,
    close,
    refused,
    same,
    sample,
)
from tests._ranks import Ranks
from tests._suites import MODES, SUITES, Operator, compile_whole, values


def total(inputs: list[Array], rank: int) -> Array:
    """Add up; for booleans NumPy's addition is OR."""
    return functools.reduce(np.add, inputs)


def largest(inputs: list[Array], rank: int) -> Array:
    return functools.reduce(np.maximum, inputs)


def smallest(inputs: list[Array], rank: int) -> Array:
    return functools.reduce(np.minimum, inputs)


def product(inputs: list[Array], rank: int) -> Array:
    return functools.reduce(np.multiply, inputs)


def mean(inputs: list[Array], rank: int) -> Array:
    return np.asarray(total(inputs, rank) / np.asarray(len(inputs)).astype(inputs[0].real.dtype))


REAL = (*FLOATS, *INTEGERS)
reduction = functools.partial(Operator, ops.all_reduce, reduces=True, in_place=True)
SUM = reduction(total, adjoint=total, dtypes=(*REAL, *UNSIGNED, *COMPLEX, torch.bool))
OTHERS = {
    "max": reduction(largest, keywords={"op": "max"}, dtypes=(*REAL, torch.bool)),
    "min": reduction(smallest, keywords={"op": "min"}, dtypes=(*REAL, torch.bool)),
    "prod": reduction(product, keywords={"op": "prod"}, dtypes=(*REAL, *UNSIGNED, torch.bool)),
    "avg": reduction(mean, keywords={"op": "avg"}, adjoint=mean, dtypes=(*FLOATS, *COMPLEX)),
}


@pytest.mark.parametrize("suite", SUITES)
def test_sum(ranks: Ranks, suite: Any) -> None:
    ranks(suite, SUM)


@pytest.mark.parametrize("op", OTHERS)
def test_values(ranks: Ranks, op: str) -> None:
    ranks(values, OTHERS[op])


@pytest.mark.parametrize("suite", [s for s in SUITES if s.__name__ in ("compiled", "gradients")])
def test_avg(ranks: Ranks, suite: Any) -> None:
    ranks(suite, OTHERS["avg"])
