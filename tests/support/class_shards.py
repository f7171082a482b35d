"""A class axis in shards, in NumPy: who has which classes, and the cross entropy over all."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.support.checks import Array, Shape, assert_equal, rounded, wide

# What rounding to the dtype leaves of a result that is computed in float32 or wider.
NEAR = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-6, 1e-6),
    torch.float16: (2e-3, 1e-6),
    torch.bfloat16: (1e-2, 1e-6),
}


def own(sizes: Sequence[int], rank: int) -> slice:
    """Return the classes of ``rank``."""
    first = sum(sizes[:rank])
    return slice(first, first + sizes[rank])


def drawn(shape: Shape, dtype: torch.dtype, seed: int = 0, reach: float = 5.0) -> torch.Tensor:
    """Return logits of all classes, uniform in ±``reach``, the same on every rank."""
    values = np.random.default_rng([seed, *shape]).uniform(-reach, reach, shape)
    return rounded(values, dtype)


def labels(shape: Shape, total: int, kind: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return ids of the whole axis, the same on every rank."""
    return rounded(np.random.default_rng([seed, *shape, total]).integers(0, total, shape), kind)


def exponentials(logits: Array) -> tuple[Array, Array]:
    """Return z = logits - max and the sum of exp(z), over the last axis."""
    z = logits - logits.max(-1, keepdims=True)
    return z, np.exp(z).sum(-1, keepdims=True)


def hot(label: Array, total: int) -> Array:
    """Return the target of each row, 1/C at each of its C ids; ids outside count nowhere."""
    rows, ids = label.reshape(-1, label.shape[-1]), label.shape[-1]
    target = np.zeros((len(rows), total))
    for number in range(ids):
        inside = np.nonzero((rows[:, number] >= 0) & (rows[:, number] < total))[0]
        target[inside, rows[inside, number]] += 1 / ids
    return target.reshape(*label.shape[:-1], total)


def cross_entropy(logits: Array, label: Array, ignore_index: int) -> tuple[Array, Array, Array]:
    """Return loss [..., 1], softmax, and the gradient of the loss; ``label`` is [..., C]."""
    z, total = exponentials(logits)
    valid = ~(label == ignore_index).any(-1, keepdims=True)
    target = hot(label, logits.shape[-1])
    loss = np.where(valid, np.log(total) - (z * target).sum(-1, keepdims=True), 0)
    softmax = np.exp(z) / total
    return loss, softmax, np.where(valid, softmax - target, 0)


def near(actual: Any, want: Array, what: object, rtol: float, atol: float) -> None:
    """Raise unless every element is within the tolerances; NaN and inf only where expected."""
    values = wide(actual)
    assert_equal(values.shape, want.shape, f"{what}: shape")
    if not np.allclose(values, want, rtol=rtol, atol=atol, equal_nan=True):
        apart = ~np.isclose(values, want, rtol=rtol, atol=atol, equal_nan=True)
        first = tuple(np.argwhere(apart)[0])
        assert_equal(values[first], want[first], f"{what}: {apart.sum()} apart, first at {first}")


def near_dtype(actual: torch.Tensor, want: Array, dtype: torch.dtype, what: object) -> None:
    """Compare at the tolerance of a result that was rounded to ``dtype`` once."""
    assert_equal(actual.dtype, dtype, f"{what}: dtype")
    near(actual, want, what, *NEAR[dtype])
