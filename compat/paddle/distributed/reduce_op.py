"""Legacy reductions by their numbers."""

from enum import IntEnum
from typing import cast

from commlib.engines.reduction_names import ReductionName
from commlib.errors import ArgumentError


class ReduceOp(IntEnum):
    """A reduction; its number is upstream's."""

    SUM = 0
    MAX = 1
    MIN = 2
    PROD = 3
    AVG = 4


def reduction(name: str, op: ReduceOp | int) -> ReductionName:
    """Return a reduction as rings know it.

    Raises:
        ArgumentError: ``op`` is not a ``ReduceOp``.
    """
    try:
        return cast(ReductionName, ReduceOp(op).name.lower())
    except ValueError:
        names = ", ".join(f"ReduceOp.{one.name}" for one in ReduceOp)
        raise ArgumentError(f"{name}: op={op!r}; expected one of {names}") from None
