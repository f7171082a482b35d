"""ops.reduce_scatter: rank r gets the r-th part of the reduction."""

import functools
from typing import Any

import torch

from commlib import ops
from commlib.errors import ArgumentError, DtypeError
from tests.support.checks import Array, assert_bits_equal, raises, sample, wide
from tests.support.formulas import (
    AVERAGED,
    REAL,
    SUMMED,
    joined,
    largest,
    mean,
    own_part_of_total,
    part,
    product,
    smallest,
)
from tests.support.operator import MODES, Operator
from tests.support.runs_on import runs_on
from tests.support.suites import suite_of

# Any: the tests also pass arguments that a type checker rejects.
reduce_scatter: Any = ops.reduce_scatter


def own_part(formula: Any, inputs: list[Array], rank: int) -> Array:
    return part(formula(inputs, rank), rank, len(inputs))


def shared_gradient(weights: list[Array], rank: int) -> Array:
    return joined(weights, rank) / len(weights)


scatter = functools.partial(Operator, ops.reduce_scatter, reduces=True, divides=True)
SUM = scatter(own_part_of_total, adjoint=joined, dtypes=SUMMED)
OTHERS = {
    op: scatter(functools.partial(own_part, formula), keywords={"op": op}, dtypes=dtypes, **more)
    for op, formula, dtypes, more in (
        ("max", largest, (*REAL, torch.bool), {}),
        ("min", smallest, (*REAL, torch.bool), {}),
        ("prod", product, (*REAL, torch.bool), {}),
        ("avg", mean, AVERAGED, {"adjoint": shared_gradient}),
    )
}


test_suite = suite_of(SUM, **OTHERS)


@runs_on("ranks")
def test_output_inside_input(comm: Any) -> None:
    """The output may be this rank's own part of the input."""
    for dtype in SUM.dtypes:
        both = [sample(rank, (6, 5), dtype) for rank in range(2)]
        want = own_part_of_total([wide(x) for x in both], comm.rank)
        for name, mode in MODES.items():
            x = both[comm.rank].to(comm.device, copy=True)
            out = x[3 * comm.rank : 3 * comm.rank + 3]
            assert_bits_equal(SUM(x, out=out, **mode), want, f"{dtype} {name}")


@runs_on("ranks")
def test_refused_reductions(comm: Any) -> None:
    x = torch.zeros(4, device=comm.device)
    with raises(DtypeError, "int16", "torch.int32"):
        reduce_scatter(x.short())
    with raises(ArgumentError, "mean", "avg"):
        reduce_scatter(x, op="mean")
    with raises(ArgumentError, "no gradient", "max"):
        reduce_scatter(x.requires_grad_(), op="max").sum().backward()
