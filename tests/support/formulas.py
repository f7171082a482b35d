"""The collectives in NumPy: every rank's input and one position give its result."""

import functools

import numpy as np
import torch

from tests.support.checks import COMPLEX, FLOATS, INTEGERS, UNSIGNED, Array

REAL = (*FLOATS, *INTEGERS)
SUMMED = (*REAL, *UNSIGNED, *COMPLEX, torch.bool)
AVERAGED = (*REAL, *COMPLEX)
ROOT = 1


def total(inputs: list[Array], rank: int) -> Array:
    """Add up; for booleans NumPy's addition is OR."""
    return functools.reduce(np.add, inputs)


def largest(inputs: list[Array], rank: int) -> Array:
    """Take the maximum; for booleans OR."""
    return functools.reduce(np.maximum, inputs)


def smallest(inputs: list[Array], rank: int) -> Array:
    """Take the minimum; for booleans AND."""
    return functools.reduce(np.minimum, inputs)


def product(inputs: list[Array], rank: int) -> Array:
    """Multiply; for booleans AND."""
    return functools.reduce(np.multiply, inputs)


def mean(inputs: list[Array], rank: int) -> Array:
    """Divide the sum by the number of ranks, in the dtype of the inputs; integers are truncated."""
    if inputs[0].dtype.kind in "iu":
        wrapped = total(inputs, rank)  # wraps around
        exact = [abs(int(x)) // len(inputs) * (-1 if x < 0 else 1) for x in wrapped.ravel()]
        return np.array(exact, wrapped.dtype).reshape(wrapped.shape)
    return np.asarray(total(inputs, rank) / np.asarray(len(inputs)).astype(inputs[0].real.dtype))


def joined(inputs: list[Array], rank: int) -> Array:
    """Put all inputs one after the other; 0-D ones become a vector."""
    return np.concatenate([np.atleast_1d(x) for x in inputs])


def part(x: Array, rank: int, size: int) -> Array:
    """Return the rows of ``x`` that belong to ``rank``."""
    return np.split(x, size)[rank]


def own_part_of_total(inputs: list[Array], rank: int) -> Array:
    return part(total(inputs, rank), rank, len(inputs))


def from_root(inputs: list[Array], rank: int) -> Array:
    return inputs[ROOT]


def own_part_from_root(inputs: list[Array], rank: int) -> Array:
    return part(inputs[ROOT], rank, len(inputs))


def total_or_zeros(inputs: list[Array], rank: int) -> Array:
    return total(inputs, rank) if rank == ROOT else np.zeros_like(inputs[rank])


def joined_at_root(inputs: list[Array], rank: int) -> Array:
    full = joined(inputs, rank)
    return full if rank == ROOT else full[:0]


def parts_for_rank(inputs: list[Array], rank: int) -> Array:
    return np.concatenate([part(x, rank, len(inputs)) for x in inputs])


def of_the_other(inputs: list[Array], rank: int) -> Array:
    return inputs[1 - rank]


def own(inputs: list[Array], rank: int) -> Array:
    return inputs[rank]


def side_by_side(inputs: list[Array], rank: int) -> Array:
    return np.concatenate(inputs, axis=-1)


def own_columns(inputs: list[Array], rank: int) -> Array:
    return np.split(inputs[rank], len(inputs), axis=-1)[rank]
