"""A transformer's two blocks in NumPy, float64: values and gradients, and shards for ranks."""

from math import erf, pi
from typing import Any

import numpy as np

from tests.support.checks import Array

Grads = dict[str, Array]


def draw(seed: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    """Return float64 tensors by name, the same on every rank."""
    values = np.random.default_rng(seed)
    return {name: 0.5 * values.standard_normal(shape) for name, shape in shapes.items()}


class Norm:
    """A layer norm over the last axis."""

    def __init__(self, weights: dict[str, Array], eps: float = 1e-5) -> None:
        self.weights, self.eps = weights, eps

    def forward(self, x: Array) -> Array:
        """Return the normalised rows."""
        centred = x - x.mean(-1, keepdims=True)
        self.factor = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + self.eps)
        self.rows: Array = centred * self.factor
        y: Array = self.rows * self.weights.get("ln_weight", 1.0) + self.weights.get("ln_bias", 0.0)
        return y

    def backward(self, grad: Array, grads: Grads) -> Array:
        """Return the gradient by x."""
        grads["ln_weight"], grads["ln_bias"] = (grad * self.rows).sum((0, 1)), grad.sum((0, 1))
        by_rows = grad * self.weights.get("ln_weight", 1.0)
        mean = by_rows.mean(-1, keepdims=True)
        along = (by_rows * self.rows).mean(-1, keepdims=True)
        by_x: Array = self.factor * (by_rows - mean - self.rows * along)
        return by_x


class Attention:
    """The part of attention between the layer norms, with all heads."""

    def __init__(self, weights: dict[str, Array], allowed: Array | None, keep: Any = 1.0) -> None:
        """``allowed``: a float mask to add. ``keep``: factors of the probabilities."""
        self.weights, self.allowed, self.keep = weights, allowed, keep

    def forward(self, h: Array) -> Array:
        """Return the projected context, with its bias."""
        w = self.weights
        self.h = h
        qkv = np.einsum("bse,ahde->abhsd", h, w["qkv_weight"])
        if "qkv_bias" in w:
            qkv = qkv + w["qkv_bias"][:, None, :, None, :]
        self.q, self.k, self.v = qkv
        scores = np.einsum("bhsd,bhtd->bhst", self.q, self.k) / np.sqrt(self.q.shape[-1])
        scores = scores if self.allowed is None else scores + self.allowed
        exp = np.exp(scores - scores.max(-1, keepdims=True))
        self.softmax = exp / exp.sum(-1, keepdims=True)
        self.kept = self.softmax * self.keep
        context = np.einsum("bhst,bhtd->bshd", self.kept, self.v)
        self.context = context.reshape(*h.shape[:2], -1)
        out: Array = self.context @ w["linear_weight"] + w.get("linear_bias", 0.0)
        return out

    def backward(self, grad: Array, grads: Grads) -> Array:
        """Return the gradient by h."""
        w = self.weights
        grads["linear_bias"] = grad.sum((0, 1))
        grads["linear_weight"] = np.einsum("bsc,bse->ce", self.context, grad)
        by_context = (grad @ w["linear_weight"].T).reshape(
            *grad.shape[:2], self.q.shape[1], self.q.shape[3]
        )
        by_v = np.einsum("bhst,bshd->bhtd", self.kept, by_context)
        by_kept = np.einsum("bshd,bhtd->bhst", by_context, self.v) * self.keep
        inner = (by_kept * self.softmax).sum(-1, keepdims=True)
        by_scores = self.softmax * (by_kept - inner) / np.sqrt(self.q.shape[-1])
        by_q = np.einsum("bhst,bhtd->bhsd", by_scores, self.k)
        by_k = np.einsum("bhst,bhsd->bhtd", by_scores, self.q)
        by_qkv = np.stack([by_q, by_k, by_v])
        grads["qkv_bias"] = by_qkv.sum((1, 3))
        grads["qkv_weight"] = np.einsum("abhsd,bse->ahde", by_qkv, self.h)
        by_h: Array = np.einsum("abhsd,ahde->bse", by_qkv, w["qkv_weight"])
        return by_h


class FeedForward:
    """The part of a feed-forward block between the layer norms, with all units."""

    def __init__(self, weights: dict[str, Array], activation: str, keep: Any = 1.0) -> None:
        """``keep``: factors of the hidden units."""
        self.weights, self.activation, self.keep = weights, activation, keep

    def forward(self, h: Array) -> Array:
        """Return the output of the second layer, with its bias."""
        w = self.weights
        self.h = h
        self.inner = h @ w["linear1_weight"] + w.get("linear1_bias", 0.0)
        if self.activation == "relu":
            active, self.slope = np.maximum(self.inner, 0), (self.inner > 0).astype("f8")
        else:
            share = 0.5 * (1 + np.vectorize(erf)(self.inner / np.sqrt(2)))
            density = np.exp(-(self.inner**2) / 2) / np.sqrt(2 * pi)
            active, self.slope = self.inner * share, share + self.inner * density
        self.kept = active * self.keep
        out: Array = self.kept @ w["linear2_weight"] + w.get("linear2_bias", 0.0)
        return out

    def backward(self, grad: Array, grads: Grads) -> Array:
        """Return the gradient by h."""
        w = self.weights
        grads["linear2_bias"] = grad.sum((0, 1))
        grads["linear2_weight"] = np.einsum("bsf,bse->fe", self.kept, grad)
        by_inner = (grad @ w["linear2_weight"].T) * self.keep * self.slope
        grads["linear1_bias"] = by_inner.sum((0, 1))
        grads["linear1_weight"] = np.einsum("bse,bsf->ef", self.h, by_inner)
        by_h: Array = by_inner @ w["linear1_weight"].T
        return by_h


def block(
    x: Array,
    inner: Attention | FeedForward,
    grad: Array,
    *,
    before: bool,
    keep: Any = 1.0,
    add_residual: bool = True,
) -> tuple[Array, Grads]:
    """Return a block's result and the gradients of sum(result * grad), "x" among them.

    ``before``: the layer norm comes first. ``keep``: factors of the output.
    """
    norm, grads = Norm(inner.weights), Grads()
    out = inner.forward(norm.forward(x) if before else x) * keep
    z = out + x if add_residual else out
    y = z if before else norm.forward(z)
    by_z = grad if before else norm.backward(grad, grads)
    by_h = inner.backward(by_z * keep, grads)
    by_x = norm.backward(by_h, grads) if before else by_h
    grads["x"] = by_x + by_z if add_residual else by_x
    return y, {name: g for name, g in grads.items() if name == "x" or name in inner.weights}
