"""Attention of new tokens over a cache, with rotary embedding and grouped query heads."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from commlib.ops.inference.kv_cache import KVCache
from commlib.ops.inference.rotary import Rotary

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Attention:
    """What all layers of one call share.

    ``places`` are the two indices of the new tokens in the cache. ``bias`` [B, 1, S, capacity] is
    added to the scores. None: the sequences begin with this call, and the new tokens suffice.
    """

    cache: KVCache
    head_dim: int
    places: tuple[Tensor, Tensor]
    rotary: Rotary | None
    bias: Tensor | None

    def __call__(self, qkv: Tensor, heads: int, layer: int) -> Tensor:
        """Return [B, S, heads * D] for one layer, whose keys and values go into the cache."""
        parts = qkv.view(*qkv.shape[:2], -1, self.head_dim)
        kv_heads = (parts.shape[2] - heads) // 2
        q, k, v = parts.split([heads, kv_heads, kv_heads], dim=2)
        if self.rotary is not None:
            q, k = self.rotary.rotate(q), self.rotary.rotate(k)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.index_put_(self.places, k)
        values.index_put_(self.places, v)
        if self.bias is None:
            return _causal(q, k, v)
        count = qkv.shape[0]
        return _cached(
            q, self.cache.gathered(keys, count), self.cache.gathered(values, count), self.bias
        )


def prepare(
    cache: KVCache, head_dim: int, positions: Tensor, rotary: Rotary | None, x: Tensor, begins: bool
) -> Attention:
    """Return what all layers share, for new tokens of ``x`` at ``positions`` [B, S]."""
    turned = None if rotary is None else rotary.at(positions)
    bias = None if begins else _bias(positions, cache.capacity, x.dtype)
    return Attention(cache, head_dim, cache.places(positions), turned, bias)


def _bias(positions: Tensor, capacity: int, dtype: torch.dtype) -> Tensor:
    """Return 0 where a token may look, -inf elsewhere."""
    later = torch.arange(capacity, device=positions.device) > positions.unsqueeze(-1)
    bias = torch.zeros(later.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(later, -torch.inf).unsqueeze(1)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of tokens [B, S, heads, D] over themselves."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    joined: Tensor = y.transpose(1, 2).flatten(2)
    return joined


def _cached(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Return the attention of tokens [B, S, heads, D] over all positions of the cache.

    The query heads of a group become rows of one head, so that keys are not repeated.
    """
    count, length, heads, width = q.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    rows = q.view(count, length, kv_heads, group, width).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(count, kv_heads, group * length, width)
    biases = bias if length == 1 else bias.repeat(1, 1, group, 1)
    y = F.scaled_dot_product_attention(
        rows, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=biases
    )
    y = y.unflatten(2, (group, length)).permute(0, 3, 1, 2, 4)
    joined: Tensor = y.reshape(count, length, heads * width)
    return joined
