"""The legacy operator for the layers of a GPT, split over the ranks."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring_of
from commlib.errors import ArgumentError
from commlib.ops.inference import ContiguousCache, DecoderConfig, DecoderLayer
from commlib.streams import sees_capture

Tensor = torch.Tensor
Biases: TypeAlias = Sequence[Tensor | None] | None

NAME = "fused_multi_transformer"
HIDDEN_BELOW = -1e3  # an additive mask hides a position with this or less


def fused_multi_transformer(
    x: Tensor,
    ln_scales: Sequence[Tensor],
    ln_biases: Biases,
    qkv_weights: Sequence[Tensor],
    qkv_biases: Biases,
    linear_weights: Sequence[Tensor],
    linear_biases: Biases,
    ffn_ln_scales: Sequence[Tensor],
    ffn_ln_biases: Biases,
    ffn1_weights: Sequence[Tensor],
    ffn1_biases: Biases,
    ffn2_weights: Sequence[Tensor],
    ffn2_biases: Biases,
    pre_layer_norm: bool = True,
    epsilon: float = 1e-5,
    cache_kvs: Sequence[Tensor] | None = None,
    time_step: int | Tensor | None = None,
    attn_mask: Tensor | None = None,
    activation: str = "gelu",
    trans_qkvw: bool = True,
    ring_id: int = -1,
) -> Tensor | tuple[Tensor, Sequence[Tensor]]:
    """Run layers of a GPT, and put keys and values of the new tokens into ``cache_kvs``.

    Source: operator ``fused_multi_transformer``, without dropout, ``pre_caches``, ``seq_lens`` and
    ``rotary_embs``. It runs on the current stream. Attention is causal.

    Args:
        x: [B, S, E], the same on every rank.
        ln_scales: Per layer [E].
        ln_biases: Per layer [E].
        qkv_weights: Per layer [3, heads of the rank, D, E].
        qkv_biases: Per layer [3, heads of the rank, D].
        linear_weights: Per layer [heads of the rank * D, E].
        linear_biases: Per layer [E], added once, after the sum.
        ffn_ln_scales: Per layer [E].
        ffn_ln_biases: Per layer [E].
        ffn1_weights: Per layer [E, F of the rank].
        ffn1_biases: Per layer [F of the rank].
        ffn2_weights: Per layer [F of the rank, E].
        ffn2_biases: Per layer [E], added once, after the sum.
        pre_layer_norm: As ``pre_norm`` of ``DecoderConfig``.
        epsilon: Of the norms.
        cache_kvs: Per layer [2, B, heads of the rank, longest sequence, D], written in place.
        time_step: Position of the first new token. None: the sequences begin.
        attn_mask: None, or the causal mask: True or about 0 where a token may look.
        activation: "gelu" or "relu".
        trans_qkvw: False: ``qkv_weights`` are [E, 3, heads of the rank, D].
        ring_id: The ring; -1 sums nothing.

    Returns:
        [B, S, E]; with ``cache_kvs`` also these.

    Raises:
        ArgumentError: The mask is not causal, the lists have other lengths, or ``time_step``
            without ``cache_kvs``.
        CommError: As ``ops.fused_multi_transformer``.
    """
    ring = None if ring_id == -1 else ring_of(NAME, ring_id)
    where, size = (NAME, 1) if ring is None else (ring._describe(NAME), ring.size)
    if time_step is not None and cache_kvs is None:
        raise ArgumentError(f"{where}: time_step without cache_kvs; pass both, or neither")
    if attn_mask is not None:
        _check_causal(where, attn_mask)
    columns = {
        "attention_norm": ln_scales,
        "attention_norm_bias": ln_biases,
        "qkv": [_rows(weight, trans_qkvw) for weight in qkv_weights],
        "qkv_bias": _each(qkv_biases, torch.flatten),
        "out": _each(linear_weights, torch.t),
        "out_bias": linear_biases,
        "ffn_norm": ffn_ln_scales,
        "ffn_norm_bias": ffn_ln_biases,
        "up": _each(ffn1_weights, torch.t),
        "up_bias": ffn1_biases,
        "down": _each(ffn2_weights, torch.t),
        "down_bias": ffn2_biases,
    }
    lengths = {name: len(column) for name, column in columns.items() if column is not None}
    if len(set(lengths.values())) != 1:
        raise ArgumentError(f"{where}: weights of {lengths} layers; expected the same number each")
    count = lengths["qkv"]
    layers = [
        DecoderLayer(**{name: column[number] for name, column in columns.items() if column})
        for number in range(count)
    ]
    heads, head_dim = qkv_weights[0].shape[1:3] if trans_qkvw else qkv_weights[0].shape[2:]
    config = DecoderConfig(
        hidden=x.shape[-1],
        heads=heads * size,
        kv_heads=heads * size,
        head_dim=head_dim,
        inner=ffn1_weights[0].shape[1] * size,
        norm="layer",
        pre_norm=pre_layer_norm,
        activation=activation,
        gated=False,
        eps=epsilon,
    )
    cache = _cache(x, config, count, size, cache_kvs)
    y = ops.fused_multi_transformer(
        x,
        layers,
        cache,
        None if ring is None else ring_id,
        config=config,
        start=_start(x, time_step),
    )
    return y if cache_kvs is None else (y, cache_kvs)


def _rows(weight: Tensor, trans_qkvw: bool) -> Tensor:
    """Return a weight as [3 * heads * D, E]."""
    return weight.flatten(0, 2) if trans_qkvw else weight.flatten(1, 3).t()


def _each(column: Any, change: Any) -> Any:
    return column and [None if one is None else change(one) for one in column]


def _cache(
    x: Tensor, config: DecoderConfig, count: int, size: int, cache_kvs: Sequence[Tensor] | None
) -> ContiguousCache:
    """Return views of the legacy caches, or a cache for this call alone."""
    if cache_kvs is not None:
        keys, values = (
            tuple(cache[kind].transpose(1, 2) for cache in cache_kvs) for kind in (0, 1)
        )
        return ContiguousCache(keys, values)
    return ContiguousCache.zeros(
        config,
        layers=count,
        sequences=x.shape[0],
        capacity=x.shape[1],
        ranks=size,
        dtype=x.dtype,
        device=x.device,
    )


def _start(x: Tensor, time_step: int | Tensor | None) -> int | Tensor:
    """Return the position of the first token; a tensor on a GPU is not read."""
    if time_step is None:
        return 0
    if isinstance(time_step, Tensor):
        same_device = time_step.device == x.device
        return time_step.reshape(1).expand(x.shape[0]) if same_device else int(time_step)
    return time_step


def _check_causal(where: str, mask: Tensor) -> None:
    """Raise unless the last S of T positions are new tokens, which see no later ones."""
    if torch.compiler.is_compiling() or sees_capture(mask):
        return
    seen = mask if mask.dtype is torch.bool else mask > HIDDEN_BELOW
    length, whole = mask.shape[-2:]
    causal = torch.ones(length, whole, dtype=torch.bool, device=mask.device).tril(whole - length)
    if not bool((seen == causal).all()):
        raise ArgumentError(
            f"{where}: attn_mask of shape {tuple(mask.shape)} is not causal; expected the mask "
            f"that hides later tokens and no others; pass attn_mask=None"
        )
