"""The legacy operator for the layers of a GPT, split over the ranks."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring_of
from commlib.compat.paddle.inference_inputs import Inputs, hide_from
from commlib.errors import ArgumentError
from commlib.ops.inference import DecoderConfig
from commlib.ops.inference._fused_multi_transformer import check_inputs
from commlib.streams import sees_capture

Tensor = torch.Tensor
Biases: TypeAlias = Sequence[Tensor | None] | None

NAME = "fused_multi_transformer"


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
    pre_caches: Sequence[Tensor] | None = None,
    seq_lens: Tensor | None = None,
    rotary_embs: Tensor | None = None,
    time_step: int | Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_rate: float = 0.0,
    rotary_emb_dims: int = 0,
    activation: str = "gelu",
    training: bool = False,
    mode: str = "upscale_in_train",
    trans_qkvw: bool = True,
    ring_id: int = -1,
    name: str | None = None,
) -> Tensor | tuple[Tensor, Sequence[Tensor]]:
    """Run layers of a GPT, and put keys and values of the new tokens into ``cache_kvs``.

    Source: operator ``fused_multi_transformer`` with the arguments of Paddle 2.6. It runs on the
    current stream.

    Args:
        x: [B, S, E], the same on every rank.
        ln_scales: Per layer [E]; in float32 they are converted to the dtype of ``x``, as the other
            parameters of norms.
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
        pre_caches: Per layer [2, B, heads of the rank, P, D]: keys and values of a prefix, which
            take the first P positions; without ``time_step``.
        seq_lens: [B]. Without ``time_step`` the tokens of each sequence: later ones are hidden, and
            their rows of the result are 0. With it the position of each new token.
        rotary_embs: [2, B, 1, S, D], cosines and sines of the new tokens.
        time_step: Position of the first new token. None: the sequences begin.
        attn_mask: [B, heads of the rank or 1, S, K]: numbers that are added, or True and integers
            other than 0 where a token may look. None: attention is causal.
        dropout_rate: Without effect in inference.
        rotary_emb_dims: Parts of a head with their own angles, 1 or 2; 0 without ``rotary_embs``.
        activation: "gelu" or "relu".
        training: False.
        mode: "upscale_in_train".
        trans_qkvw: False: ``qkv_weights`` are [E, 3, heads of the rank, D].
        ring_id: The ring; -1 sums nothing.
        name: Ignored.

    Returns:
        [B, S, E]; with ``cache_kvs`` also these.

    Raises:
        ArgumentError: An option is not supported, the lists have other lengths, or ``time_step``
            without ``cache_kvs``.
        CommError: As ``ops.fused_multi_transformer``.
    """
    ring = None if ring_id == -1 else ring_of(NAME, ring_id)
    label, size = (NAME, 1) if ring is None else (ring._describe(NAME), ring.size)
    inputs = Inputs(label, x, size)
    inputs.dropout(dropout_rate, training, mode)
    _check_stage(label, time_step, cache_kvs, pre_caches)
    columns = {
        "attention_norm": ln_scales,
        "attention_norm_bias": ln_biases,
        "qkv": qkv_weights,
        "qkv_bias": qkv_biases,
        "out": linear_weights,
        "out_bias": linear_biases,
        "ffn_norm": ffn_ln_scales,
        "ffn_norm_bias": ffn_ln_biases,
        "up": ffn1_weights,
        "up_bias": ffn1_biases,
        "down": ffn2_weights,
        "down_bias": ffn2_biases,
    }
    layers = inputs.columns(columns, trans_qkvw)
    heads, head_dim = qkv_weights[0].shape[1:3] if trans_qkvw else qkv_weights[0].shape[2:]
    inner = ffn1_weights[0].shape[-1] * size
    options = {"pre_norm": pre_layer_norm, "activation": activation, "eps": epsilon}
    config = _config(x.shape[-1], heads * size, head_dim, inner, options)
    cache, prefix = inputs.cache(config, len(layers), cache_kvs, pre_caches)
    lengths, mask = inputs.lengths(seq_lens), inputs.mask(attn_mask)
    start = prefix if time_step is None else _start(x, time_step, lengths)
    if mask is not None:
        mask = _narrowed(x, mask, start, prefix, time_step, lengths)
    rotary = inputs.rotary(rotary_embs, rotary_emb_dims, head_dim)
    kwargs: dict[str, Any] = {"start": start, "rotary": rotary, "attn_mask": mask}
    call = layers, cache, None if ring is None else ring_id
    if pre_caches is not None:  # which are in the cache before the operator checks the rest
        check_inputs(x, *call, config, **kwargs, read=not sees_capture(x))
        inputs.fill(cache, pre_caches, prefix)
    y = ops.fused_multi_transformer(x, *call, config=config, **kwargs)
    if lengths is not None and time_step is None:
        rows = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        y = y.masked_fill(rows.unsqueeze(-1), 0)
    return y if cache_kvs is None else (y, cache_kvs)


def _config(
    hidden: int, heads: int, head_dim: int, inner: int, options: dict[str, Any]
) -> DecoderConfig:
    """Return the sizes of all ranks together, with the legacy operator's norm."""
    return DecoderConfig(
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        inner=inner,
        norm="layer",
        gated=False,
        **options,
    )


def _check_stage(where: str, time_step: Any, cache_kvs: Any, pre_caches: Any) -> None:
    if time_step is not None and cache_kvs is None:
        raise ArgumentError(f"{where}: time_step without cache_kvs; pass both, or neither")
    if time_step is not None and pre_caches is not None:
        raise ArgumentError(
            f"{where}: pre_caches with time_step; expected it in the call without time_step, which "
            f"puts it into cache_kvs; pass pre_caches=None"
        )
    is_int = isinstance(time_step, int) and not isinstance(time_step, bool)
    one = isinstance(time_step, Tensor) and time_step.numel() == 1
    if time_step is not None and not is_int and not one:
        raise ArgumentError(
            f"{where}: time_step={time_step!r}; expected an integer or a tensor of one; pass the "
            f"position of the first new token"
        )


def _start(x: Tensor, time_step: int | Tensor, lengths: Tensor | None) -> int | Tensor:
    """Return the position of the first token; a tensor on a GPU is not read."""
    if lengths is not None:
        return lengths
    if isinstance(time_step, Tensor):
        same_device = time_step.device == x.device
        return time_step.reshape(1).expand(x.shape[0]) if same_device else int(time_step)
    return time_step


def _narrowed(
    x: Tensor,
    mask: Tensor,
    start: int | Tensor,
    prefix: int,
    time_step: int | Tensor | None,
    lengths: Tensor | None,
) -> Tensor:
    """Return a mask that also hides positions without a token."""
    if time_step is None:
        return mask if lengths is None else hide_from(mask, lengths + prefix)
    first = start if isinstance(start, Tensor) else x.new_full((x.shape[0],), start).long()
    return hide_from(mask, first + x.shape[1])
