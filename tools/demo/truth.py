"""Formulas in NumPy of the results that every collective of the demo must return."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def _everyone(x: Array, result: Array) -> Array:
    """Return the same result for every rank."""
    return np.stack([result] * len(x))


def _reduce_sum(x: Array) -> Array:
    """Return the sum for rank 0 and its own input for every other rank."""
    return np.concatenate([x.sum(0, keepdims=True), x[1:]])


def _embedding(x: Array) -> Array:
    """Return the rows of all ids in order: a rank has its own rows and zeros for the others."""
    ranks, rows = x.shape[:2]
    result = np.zeros((ranks, ranks, *x.shape[1:]), x.dtype)
    result[range(ranks), range(ranks)] = x
    return result.reshape(ranks, ranks * rows, *x.shape[2:])


def _all_to_all(x: Array) -> Array:
    chunks = x.reshape(len(x), len(x), -1, *x.shape[2:])
    return chunks.swapaxes(0, 1).reshape(x.shape)


# x[r] is the input of rank r, result[r] its output; the number of ranks divides x[r].shape[0].
FORMULAS: dict[str, Callable[[Array], Array]] = {
    "input": lambda x: x,
    "c_allgather": lambda x: _everyone(x, np.concatenate(list(x))),
    "c_allreduce_sum": lambda x: _everyone(x, x.sum(0)),
    "c_allreduce_max": lambda x: _everyone(x, x.max(0)),
    "c_allreduce_min": lambda x: _everyone(x, x.min(0)),
    "c_allreduce_prod": lambda x: _everyone(x, x.prod(0)),
    "mp_allreduce_sum": lambda x: _everyone(x, x.sum(0)),
    "c_broadcast": lambda x: _everyone(x, x[-1]),
    "c_reduce_sum": _reduce_sum,
    "c_reducescatter": lambda x: x.sum(0).reshape(len(x), -1, *x.shape[2:]),
    "c_scatter": lambda x: x[0].reshape(len(x), -1, *x.shape[2:]),
    "alltoall": _all_to_all,
    "send_v2, recv_v2": lambda x: np.roll(x, 1, axis=0),
    "c_identity": lambda x: x,
    "c_concat": lambda x: _everyone(x, np.concatenate(list(x), axis=-1)),
    "c_split": lambda x: x,
    "c_embedding": _embedding,
    "barrier": lambda x: np.ones((len(x), 1), x.dtype),
}
