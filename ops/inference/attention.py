"""Attention of new tokens over a cache, with rotary embedding and grouped query heads."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from commlib.ops.inference.decode_attention import DecodeAttention, decode_attention
from commlib.ops.inference.kv_cache import KVCache
from commlib.ops.inference.rotary import Rotary, TokenRotary

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Attention:
    """The arguments that all layers of one call share.

    ``places`` are the two indices of the new tokens in the cache. ``begins``: the sequences begin
    with this call, and the new tokens suffice. ``bias`` is added to the scores: [B, heads or 1, S,
    capacity], or with ``begins`` [B, heads or 1, S, S]. None: causal attention of new tokens.
    ``later`` [B, capacity, 1, 1] are positions after the new tokens that none of them sees: what is
    there may be NaN, and NaN times 0 is NaN. None: it is finite.
    """

    cache: KVCache
    head_dim: int
    places: tuple[Tensor, Tensor]
    rotary: Rotary | TokenRotary | None
    bias: Tensor | None
    begins: bool
    later: Tensor | None = None

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
        if self.begins:
            return _fresh(q, k, v, self.bias)
        assert self.bias is not None
        return _cached(q, self._seen(keys, q), self._seen(values, q), self.bias)

    def _seen(self, memory: Tensor, q: Tensor) -> Tensor:
        """Return one layer's keys or values of the sequences, 0 after the new tokens."""
        gathered = self.cache.gathered(memory, q.shape[0])
        return gathered if self.later is None else gathered.masked_fill(self.later, 0)


def prepare(
    cache: KVCache,
    head_dim: int,
    positions: Tensor,
    rotary: Rotary | TokenRotary | None,
    x: Tensor,
    begins: bool,
    mask: Tensor | None = None,
    *,
    kernels: bool = True,
) -> Attention | DecodeAttention:
    """Return what all layers share, for new tokens of ``x`` at ``positions`` [B, S].

    ``mask`` replaces causal attention. ``kernels=False``: by torch operators alone, over a cache
    that holds no NaN.
    """
    if kernels and mask is None and not begins:
        step = decode_attention(cache, head_dim, positions, rotary, x)
        if step is not None:
            return step
    turned = None if rotary is None else rotary.at(positions)
    bias = None
    if mask is not None:
        bias = _masked(mask, x, None if begins else cache.capacity)
    elif not begins:
        bias = _bias(positions, cache.capacity, x.dtype)
    later = None
    if kernels and not begins:
        later = _later(positions[:, -1], cache.capacity)
        later = later if mask is None else later & ~_seen_by(mask, cache.capacity)
        later = later[:, :, None, None]
    return Attention(cache, head_dim, cache.places(positions), turned, bias, begins, later)


def _masked(mask: Tensor, x: Tensor, capacity: int | None) -> Tensor:
    """Return a mask as numbers that are added, finite so that a row that sees nothing is not NaN.

    Positions of the cache after the mask are hidden.
    """
    least = torch.finfo(x.dtype).min / 2
    if mask.dtype is torch.bool:
        bias = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, least)
    else:
        bias = mask.to(x.dtype).clamp(min=least)
    bias = bias.expand(-1, -1, x.shape[1], -1)
    if capacity is None:
        return bias
    return F.pad(bias, (0, capacity - mask.shape[-1]), value=-torch.inf)


def _seen_by(mask: Tensor, capacity: int) -> Tensor:
    """Return which positions of the cache a mask lets a token see: [sequences or 1, capacity]."""
    seen = mask if mask.dtype is torch.bool else mask > -torch.inf
    return F.pad(seen.any(2).any(1), (0, capacity - mask.shape[-1]))


def _bias(positions: Tensor, capacity: int, dtype: torch.dtype) -> Tensor:
    """Return 0 where a token may look, -inf elsewhere."""
    later = _later(positions, capacity)
    bias = torch.zeros(later.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(later, -torch.inf).unsqueeze(1)


def _later(positions: Tensor, capacity: int) -> Tensor:
    """Return which positions of the cache are after others: [*positions.shape, capacity]."""
    return torch.arange(capacity, device=positions.device) > positions.unsqueeze(-1)


def _fresh(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Return the attention of tokens [B, S, heads, D] over themselves; causal without a bias."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}  # no symbol, if compiled
    y = F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None, **grouped)
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
    if bias.shape[1] > 1:  # one per head
        biases = bias.unflatten(1, (kv_heads, group)).flatten(2, 3)
    else:
        biases = bias if length == 1 else bias.repeat(1, 1, group, 1)
    y = F.scaled_dot_product_attention(
        rows, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=biases
    )
    y = y.unflatten(2, (group, length)).permute(0, 3, 1, 2, 4)
    joined: Tensor = y.reshape(count, length, heads * width)
    return joined
