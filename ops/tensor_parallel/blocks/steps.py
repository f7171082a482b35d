"""Steps that the attention and the feed-forward block share: layer norm and dropout."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from commlib.ops.registered.traced_ring import rank_of, size_of
from commlib.ops.tensor_parallel.column_linear import NO_RING

Tensor = torch.Tensor


class LayerNorm(NamedTuple):
    """The layer norm of a block: before its first linear layer, or after its residual."""

    before: bool
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised rows in the dtype of ``x``, computed in the widest dtype."""
        dtype = x.dtype
        for tensor in (self.weight, self.bias):
            dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
        weight = None if self.weight is None else self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        rows = F.layer_norm(x.to(dtype), x.shape[-1:], weight, bias, self.eps)
        return rows.to(x.dtype)


class Dropout(NamedTuple):
    """A dropout whose masks fit a ring; they come from the default generator of the device.

    All ranks draw the same numbers. Their generators must have the same state before, and have the
    same state after. ``upscale=False``: values are scaled in inference instead of in training.
    """

    rate: float
    training: bool = True
    upscale: bool = True

    @property
    def draws(self) -> bool:
        """True if a mask is drawn."""
        return self.training and self.rate > 0

    @property
    def leaves_some(self) -> bool:
        """True unless all values are dropped."""
        return not (self.draws and self.rate == 1)

    @property
    def factor(self) -> float:
        """The factor of values that are kept."""
        if self.draws:
            return 1 / (1 - self.rate) if self.upscale and self.rate < 1 else 1.0
        return 1.0 if self.training or self.upscale else 1 - self.rate

    def replicated(self, x: Tensor) -> Tensor:
        """Drop the same values on every rank: ``x`` is the same on every rank."""
        if not self.draws:
            return self._scaled(x)
        dropped = F.dropout(x, self.rate)
        return dropped if self.upscale else dropped * (1 - self.rate)

    def sharded(self, x: Tensor, dim: int, ring_id: int) -> Tensor:
        """Drop other values on each rank: ``x`` is this rank's part of a whole along ``dim``.

        The mask is this rank's part of a mask of the whole. It does not depend on how many ranks
        share the whole. Compiled code computes this part alone.
        """
        if not self.draws:
            return self._scaled(x)
        rank, size = position_in(ring_id)
        shape = list(x.shape)
        shape[dim] *= size
        mask = torch.empty(shape, dtype=torch.bool, device=x.device).bernoulli_(1 - self.rate)
        dropped = x * mask.narrow(dim, rank * x.shape[dim], x.shape[dim])
        return self._scaled(dropped)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.factor == 1 else x * self.factor


def position_in(ring_id: int) -> tuple[int, int]:
    """Return this rank's position in the ring and the ring's size; (0, 1) without a ring."""
    return (0, 1) if ring_id == NO_RING else (rank_of(ring_id), size_of(ring_id))
