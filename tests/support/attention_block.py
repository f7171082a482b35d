"""An attention block as tests see it: its weights in NumPy, and one rank's tensors."""

from typing import Any

import numpy as np
import torch

from commlib import ops
from tests.support.checks import Array, assert_equal
from tests.support.class_shards import near
from tests.support.transformer import Attention, block, draw

# Any: the tests also pass arguments that a type checker rejects.
attention: Any = ops.fused_attention

BATCH, TOKENS, HEADS, DIM = 2, 5, 6, 4  # heads of one, two and three ranks
WIDTH = HEADS * DIM
NAMES = ("qkv_weight", "qkv_bias", "linear_weight", "linear_bias", "ln_weight", "ln_bias")
# operators.md, section 6; wider dtypes leave what their own rounding does.
NEAR = {
    torch.float64: (1e-9, 1e-10),
    torch.float32: (1e-5, 5e-5),
    torch.float16: (2e-2, 2e-2),
    torch.bfloat16: (8e-2, 1.5e-1),
}
Torches = dict[str, torch.Tensor]


def shapes(heads: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a block with that many heads, of its input and of its gradient."""
    width = heads * DIM
    rows = dict.fromkeys(("linear_bias", "ln_weight", "ln_bias"), (width,))
    qkv = {"qkv_weight": (3, heads, DIM, width), "qkv_bias": (3, heads, DIM)}
    hidden = (BATCH, TOKENS, width)
    return qkv | {"linear_weight": (width, width)} | rows | {"x": hidden, "grad": hidden}


def shard(name: str, weight: Array, rank: int, size: int) -> Array:
    """Return the part of a rank: its heads, and all of what every rank has."""
    if name.startswith("qkv"):
        return np.split(weight, size, 1)[rank]
    return np.split(weight, size)[rank] if name == "linear_weight" else weight


class Case:
    """One block: all weights in NumPy, and this rank's tensors."""

    def __init__(
        self, comm: Any, dtype: torch.dtype = torch.float64, names: Any = NAMES, seed: int = 0
    ) -> None:
        self.comm, self.dtype = comm, dtype
        self.heads = comm.size if HEADS % comm.size else HEADS  # as many on every rank
        drawn = draw(seed, shapes(self.heads))
        drawn = {name: self._rounded(a).double().numpy() for name, a in drawn.items()}
        self.x, self.grad = drawn.pop("x"), drawn.pop("grad")
        self.weights = {name: drawn[name] for name in names}

    def _rounded(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.dtype)

    def on_device(self, values: Array) -> torch.Tensor:
        return self._rounded(values).to(self.comm.device)

    def tensors(self, rank: int | None = None, size: int | None = None) -> Torches:
        """Return fresh parameters of this rank, or of another split, and x."""
        rank = self.comm.rank if rank is None else rank
        parts = {n: shard(n, w, rank, size or self.comm.size) for n, w in self.weights.items()}
        return {n: self.on_device(p).requires_grad_() for n, p in (parts | {"x": self.x}).items()}

    def run(self, given: Torches, *ring: Any, **how: Any) -> tuple[torch.Tensor, Torches]:
        """Return the result and all gradients."""
        y = attention(*ring, **given, **how)
        y.backward(self.on_device(self.grad))
        return y.detach(), {name: self.gradient(name, t) for name, t in given.items()}

    @staticmethod
    def gradient(name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.grad is not None, name
        return tensor.grad

    def check(
        self, y: torch.Tensor, grads: Torches, what: str, size: int | None = None, **how: Any
    ) -> None:
        """Raise unless result and gradients are those of the formula."""
        size = size or self.comm.size
        inner = Attention(self.weights, how.pop("allowed", None), how.pop("keep_attn", 1.0))
        want, formulas = block(self.x, inner, self.grad, **how)
        rtol, atol = NEAR[self.dtype]
        assert_equal(y.dtype, self.dtype, what)
        near(y, want, what, rtol, atol)
        assert_equal(sorted(grads), sorted(formulas), f"{what}: gradients")
        for name, formula in formulas.items():
            part = shard(name, formula, self.comm.rank if size > 1 else 0, size)
            near(grads[name], part, f"{what}: {name}", rtol, atol * 4)
