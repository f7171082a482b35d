"""The rows of one class shard: their logits and the columns of their targets."""

from typing import NamedTuple

import torch

Tensor = torch.Tensor

IGNORED = -(2**62)  # the column of every id of an ignored row


class Rows(NamedTuple):
    """The rows of a shard and the columns of their targets.

    ``x``: [rows, classes]. ``columns``: [rows, ids] of int64, the ids of the label counted from the
    first class of the shard; those outside of it are on other ranks. A row's target is uniform over
    its ids. The logits are ``x * scale``; with ``aim`` [rows] the logit of the one target is that
    instead, and ``slope`` [rows] its derivative by ``x * scale``.
    """

    x: Tensor
    columns: Tensor
    scale: float = 1.0
    aim: Tensor | None = None
    slope: Tensor | None = None

    @property
    def owned(self) -> Tensor:
        """A mask of the ids in this shard: [rows, ids]."""
        return (self.columns >= 0) & (self.columns < self.x.shape[1])

    @property
    def places(self) -> Tensor:
        """The columns as an index that is valid for every row of a shard that is not empty."""
        return self.columns.clamp(0, self.x.shape[1] - 1)


def accumulates_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of all arithmetic: float64 for float64, otherwise float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def shift_of(top: Tensor) -> Tensor:
    """Return the value to subtract for a maximum: 0 for -inf, because -inf + inf is NaN."""
    return top.masked_fill(top == -torch.inf, 0)
