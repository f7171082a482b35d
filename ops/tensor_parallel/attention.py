"""Scaled-dot-product attention of this rank's heads: masks, cached keys and values, dropout."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from commlib.ops.tensor_parallel.blocks.steps import Dropout

Tensor = torch.Tensor


class Cache(NamedTuple):
    """Keys and values of earlier tokens: [2, batch, heads, positions, head_dim]."""

    kv: Tensor
    position: int  # of the first new token

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values, [batch, heads, tokens, head_dim]; return all of them."""
        end = self.position + k.shape[2]
        for stored, new in zip(self.kv, (k, v), strict=True):
            stored[:, :, self.position : end].copy_(new)
        return self.kv[0, :, :, :end], self.kv[1, :, :, :end]


class Masking(NamedTuple):
    """The keys of each query: ``mask`` is broadcast to [batch, heads, tokens, keys]."""

    mask: Tensor | None
    is_causal: bool

    def resolve(self, q: Tensor, k: Tensor) -> tuple[Tensor | None, bool]:
        """Return one mask, or the causal option that torch's kernels know without a mask."""
        tokens, keys = q.shape[2], k.shape[2]
        mask = self.mask
        if mask is not None and mask.dtype is not torch.bool:
            mask = mask.to(q.dtype)
        if not self.is_causal or (tokens == 1 and mask is None):
            return mask, False
        if mask is None and tokens == keys:
            return None, True
        below = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril(keys - tokens)
        if mask is None:
            return below, False
        if mask.dtype is torch.bool:
            return mask & below, False
        return mask.masked_fill(~below, -torch.inf), False


def attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    masking: Masking,
    cache: Cache | None,
    dropout: Dropout,
    ring_id: int,
) -> Tensor:
    """Return the context of each token, [batch, tokens, heads * head_dim].

    Kernels of torch do it without the probabilities in memory, unless dropout needs them.

    Args:
        qkv: Queries, keys and values, each [batch, heads, tokens, head_dim].
        masking: What a query may attend to.
        cache: Earlier keys and values; it takes the new ones.
        dropout: Of the probabilities, whose heads are sharded over the ring.
        ring_id: The ring.
    """
    q, k, v = qkv
    if cache is not None:
        k, v = cache.extended(k, v)
    mask, is_causal = masking.resolve(q, k)
    if dropout.draws:
        context = dropout.sharded(_probabilities(q, k, mask, is_causal), 1, ring_id) @ v
    else:
        if q.numel():
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        else:  # the backward of torch's kernels fails on a GPU
            context = _probabilities(q, k, mask, is_causal) @ v
        context = dropout.sharded(context, 1, ring_id)
    return context.transpose(1, 2).flatten(2)


def _probabilities(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        allowed = mask.dtype is torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if allowed else scores + mask
    scores = scores.float() if scores.dtype.itemsize == 2 else scores
    if mask is None:
        return torch.softmax(scores, -1).to(q.dtype)
    blind = (scores == -torch.inf).all(-1, keepdim=True)  # a query that sees nothing has zeros
    seen = torch.softmax(scores.masked_fill(blind, 0), -1)
    return seen.masked_fill(blind, 0).to(q.dtype)
