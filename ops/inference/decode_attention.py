"""Attention of one new token a sequence: on GPUs one kernel rotates, stores and attends."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from commlib.core.tensors import has_memory
from commlib.errors import ArgumentError
from commlib.ops.inference.few_rows import DTYPES, is_traced
from commlib.ops.inference.kv_cache import ContiguousCache, KVCache, PagedCache
from commlib.ops.inference.rotary import Rotary, TokenRotary
from commlib.ops.registered.library import register
from commlib.ops.triton_support import has_triton

Tensor = torch.Tensor

WIDTHS = (64, 128, 256)  # of a head


@dataclass(frozen=True, eq=False)
class DecodeAttention:
    """The arguments that all layers of a decode step share.

    ``positions`` [B] are those of the new tokens. ``table`` is that of a paged cache. ``cos`` and
    ``sin`` [B, D / 2] are their angles.
    """

    cache: KVCache
    positions: Tensor
    table: Tensor | None
    cos: Tensor | None
    sin: Tensor | None

    def __call__(self, qkv: Tensor, heads: int, layer: int) -> Tensor:
        """Return [B, 1, heads * D] for one layer, whose keys and values go into the cache."""
        if qkv.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                "fused_multi_transformer: a weight requires grad, and a decode step has no "
                "gradient; call it under torch.no_grad()"
            )
        call: Any = _registered_op if is_traced() else _run
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        args = self.positions, self.table, self.cos, self.sin
        result: Tensor = call(qkv, keys, values, *args, heads)
        return result


def decode_attention(
    cache: KVCache,
    head_dim: int,
    positions: Tensor,
    rotary: Rotary | TokenRotary | None,
    x: Tensor,
) -> DecodeAttention | None:
    """Return what all layers share, for causal attention of new tokens at ``positions`` [B, S].

    The result is None where torch operators attend. They do so for several tokens a sequence,
    outside of GPUs, for float32 and for caches with gaps. They also do so for heads that are
    rotated in part or in other pairs.
    """
    serves = x.is_cuda and x.dtype in DTYPES and x.shape[1] == 1 and head_dim in WIDTHS
    if not (serves and has_triton() and isinstance(cache, (ContiguousCache, PagedCache))):
        return None
    memory = *cache.keys, *cache.values
    if not all(each.is_contiguous() for each in memory) or forward_ad._current_level >= 0:
        return None
    if not (is_traced() or all(map(has_memory, (x, positions, *memory)))):
        return None
    places, cos, sin = positions[:, 0].contiguous(), None, None
    if rotary is not None:
        if not isinstance(rotary, Rotary) or rotary.interleaved:
            return None
        if 2 * rotary.cos.shape[-1] != head_dim:
            return None
        cos, sin = rotary.cos[places], rotary.sin[places]
    table = cache.table.contiguous() if isinstance(cache, PagedCache) else None
    return DecodeAttention(cache, places, table, cos, sin)


def _run(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: int,
) -> Tensor:
    from commlib.ops.inference import decode_attention_kernels as kernels  # imports Triton

    width, capacity = keys.shape[3], keys.shape[1] * (1 if table is None else table.shape[1])
    out = qkv.new_empty((qkv.shape[0], 1, heads * width))
    rotary = None if cos is None or sin is None else (cos, sin)
    heads_of_all = qkv.contiguous().view(qkv.shape[0], -1, width)
    kernels.attend(
        heads_of_all,
        keys,
        values,
        positions,
        table,
        rotary,
        out.view(qkv.shape[0], heads, width),
        capacity,
    )
    written = [memory for memory in (keys, values) if not memory.is_inference()]
    torch.autograd.graph.increment_version(written)
    return out


def _fake(qkv: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *rest: Any) -> Tensor:
    return qkv.new_empty((qkv.shape[0], 1, rest[-1] * keys.shape[3]))


_registered_op = register(
    "decode_attention(Tensor qkv, Tensor(a!) keys, Tensor(b!) values, Tensor positions, "
    "Tensor? table, Tensor? cos, Tensor? sin, int heads) -> Tensor",
    _run,
    _fake,
    ordered=False,
)
