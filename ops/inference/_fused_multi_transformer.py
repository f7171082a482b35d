"""fused_multi_transformer: the layers of a decoder, split over the ranks, for inference."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F

from commlib.core.manager import comm
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.inference.attention import Attention, prepare
from commlib.ops.inference.checks import NAME, Checks
from commlib.ops.inference.config import DecoderConfig
from commlib.ops.inference.decode_attention import DecodeAttention
from commlib.ops.inference.gated_silu import gated_silu
from commlib.ops.inference.kv_cache import KVCache, PagedCache
from commlib.ops.inference.position_checks import check_starts
from commlib.ops.inference.rotary import Rotary, TokenRotary
from commlib.ops.inference.weights import DecoderLayer, linear
from commlib.ops.registered.library import needs_op
from commlib.ops.tensor_parallel._all_reduce_residual_norm import all_reduce_residual_norm
from commlib.streams import sees_capture

Tensor = torch.Tensor
NormWeights: TypeAlias = tuple[Tensor, Tensor | None]
Linear: TypeAlias = Callable[..., Tensor]  # as ``weights.linear``
# (partial sums, residual, norm, bias of the linear layer) -> (normalised rows, rows before)
Reduce: TypeAlias = Callable[[Tensor, Tensor, NormWeights, Tensor | None], tuple[Tensor, Tensor]]


def fused_multi_transformer(
    x: Tensor,
    layers: Sequence[DecoderLayer],
    cache: KVCache,
    ring_id: Ring | None = 0,
    *,
    config: DecoderConfig,
    start: int | Tensor = 0,
    rotary: Rotary | TokenRotary | None = None,
    attn_mask: Tensor | None = None,
    final_norm: Tensor | None = None,
    final_norm_bias: Tensor | None = None,
    check_positions: bool = True,
    use_calc_stream: bool = True,
) -> Tensor:
    """Run the layers of a decoder over new tokens, and put their keys and values into a cache.

    Each rank has some heads and a part of the feed-forward weights. The two sums per layer run in
    ``all_reduce_residual_norm``, together with the residual and the next norm. There is no
    gradient. Source: operator ``fused_multi_transformer``.

    Args:
        x: [B, S, hidden], bfloat16, float16 or float32, the same on every rank: S new tokens of
            the first B sequences of the cache. S = 1 decodes.
        layers: This rank's weights, in the dtype of ``x``; linear layers may be quantized.
        cache: This rank's keys and values, in the dtype of ``x``. The call writes to it.
        ring_id: The ring, its id or its name. None: the layers are whole, nothing is reduced.
        config: The shape of the whole decoder.
        start: Position of the first new token: one number, or [B] int32 or int64. Earlier calls
            must have written all positions before it; this is not checked. The number 0 says
            that all sequences begin: attention then reads the new tokens alone.
        rotary: Tables for every position of the cache, or ``TokenRotary`` with the angles of these
            tokens. Default: no rotary embedding.
        attn_mask: Broadcast to [B, heads of the rank, S, K]: True, or 0 in a float mask that is
            added, where a token may attend. K is S if ``start`` is the number 0, else K is the
            first positions of the cache; others are hidden. Default: causal attention.
        final_norm: [hidden], a norm after the last layer, for ``pre_norm`` only.
        final_norm_bias: [hidden], for norm="layer".
        check_positions: Read ``start`` and the page table to check them: the host waits for a GPU.
            Captured and compiled calls never do. Without the check, a sequence with a position out
            of range is NaN, and its last position is overwritten. One that has pages, but none for
            a position, is NaN too. Rows of sequences without pages are undefined.
        use_calc_stream: As in ``all_reduce_residual_norm``.

    Returns:
        A new tensor of the shape of ``x``, with the same bits on every rank.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError: A tensor does not fit; the text names it.
        ArgumentError: An option is invalid, heads do not divide by the ranks, or a tensor requires
            grad. A position that is out of range or has no page also raises it. All before any
            launch.
    """
    number = None if ring_id is None else ring_number(NAME, ring_id)
    in_range = False
    if not torch.compiler.is_compiling():
        in_range = check_positions and not needs_op(x) and not sees_capture(x)
        norms = final_norm, final_norm_bias
        args = layers, cache, number, config, start, rotary, attn_mask, norms
        check_inputs(x, *args, read=in_range)
        if not x.numel():
            return torch.empty_like(x)
    if number is None:
        reduce: Reduce = partial(_add, config)
    else:
        reduce = partial(_reduce, number, config, use_calc_stream)
    positions, outside = _positions(x, cache, start)
    begins = _begins(start)
    attention = prepare(cache, config.head_dim, positions, rotary, x, begins, attn_mask)
    y = decode_layers(x, layers, attention, reduce, config, final_norm, final_norm_bias)
    return y if in_range else y.masked_fill(outside, torch.nan)


def check_inputs(
    x: Tensor,
    layers: Sequence[DecoderLayer],
    cache: KVCache,
    number: int | None,
    config: DecoderConfig,
    start: int | Tensor,
    rotary: Rotary | TokenRotary | None,
    attn_mask: Tensor | None,
    final_norm: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    read: bool,
) -> None:
    """Raise as ``fused_multi_transformer`` does before it writes anything.

    ``read``: look at the positions and the page table too.
    """
    checks = Checks(None if number is None else comm(number), config, x)
    checks.split()
    checks.activations()
    checks.layers(layers)
    checks.norm(*final_norm)
    checks.cache(cache, len(layers))
    checks.rotary(rotary, cache.capacity)
    checks.start(start)
    checks.mask(attn_mask, _begins(start), cache.capacity)
    if x.numel():
        check_starts(checks.where, x, cache, start, read=read)


def _begins(start: int | Tensor) -> bool:
    """Return True if the number 0 says that all sequences begin."""
    return isinstance(start, int) and start == 0


def _positions(x: Tensor, cache: KVCache, start: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return positions [B, S] inside of the cache, and which sequences leave it [B, 1, 1].

    A sequence leaves its pages too.
    """
    count, length = x.shape[:2]
    first = start.long()[:, None] if isinstance(start, Tensor) else start
    steps = torch.arange(length, device=x.device)
    positions = (steps + first).expand(count, length)
    inside = positions.clamp(0, cache.capacity - 1)
    outside = inside != positions
    if isinstance(cache, PagedCache):
        outside = outside | cache.lacks(inside)
    return inside, outside.any(1)[:, None, None]


def decode_layers(
    x: Tensor,
    layers: Sequence[DecoderLayer],
    attention: Attention | DecodeAttention,
    reduce: Reduce,
    config: DecoderConfig,
    final_norm: Tensor | None,
    final_norm_bias: Tensor | None,
    *,
    linear: Linear = linear,
) -> Tensor:
    """Return what the layers make of ``x``; ``reduce`` adds up, adds a residual and normalises."""
    first, last = layers[0], layers[-1]
    y = x
    if config.pre_norm:
        y = normalise(x, (first.attention_norm, first.attention_norm_bias), config)
    residual = x
    after = [(layer.attention_norm, layer.attention_norm_bias) for layer in layers[1:]]
    # Without a final norm, the rows before the norm are the result and its weight does not matter.
    final = (last.ffn_norm, None) if final_norm is None else (final_norm, final_norm_bias)
    for number, (layer, following) in enumerate(zip(layers, [*after, final], strict=True)):
        middle = layer.ffn_norm, layer.ffn_norm_bias
        if not config.pre_norm:
            following, middle = middle, (layer.attention_norm, layer.attention_norm_bias)
        heads = layer.out.shape[1] // config.head_dim
        seen = attention(linear(y, layer.qkv, layer.qkv_bias), heads, number)
        y, total = reduce(linear(seen, layer.out), residual, middle, layer.out_bias)
        residual = total if config.pre_norm else y
        inner = _feed_forward(y, layer, config, linear)
        y, total = reduce(inner, residual, following, layer.down_bias)
        residual = total if config.pre_norm else y
    return residual if final_norm is None else y


def _feed_forward(x: Tensor, layer: DecoderLayer, config: DecoderConfig, linear: Linear) -> Tensor:
    """Return this rank's partial sums, without the bias of the second linear layer."""
    inner = linear(x, layer.up, layer.up_bias)
    if config.gated and config.activation == "silu":
        return linear(gated_silu(inner), layer.down)
    if config.gated:
        gate, inner = inner.chunk(2, dim=-1)
        return linear(_activated(gate, config.activation) * inner, layer.down)
    return linear(_activated(inner, config.activation), layer.down)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def normalise(x: Tensor, norm: NormWeights, config: DecoderConfig) -> Tensor:
    """Return the norm of the rows of ``x``."""
    weight, bias = norm
    if config.norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, config.eps)
    return F.rms_norm(x, x.shape[-1:], weight, config.eps)


def _reduce(
    ring_id: int,
    config: DecoderConfig,
    use_calc_stream: bool,
    x: Tensor,
    residual: Tensor,
    norm: NormWeights,
    linear_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return all_reduce_residual_norm(
        x,
        residual,
        norm[0],
        ring_id,
        norm=config.norm,
        bias=norm[1],
        linear_bias=linear_bias,
        eps=config.eps,
        use_calc_stream=use_calc_stream,
    )


def _add(
    config: DecoderConfig,
    x: Tensor,
    residual: Tensor,
    norm: NormWeights,
    linear_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the same for whole layers: nothing is summed over ranks."""
    total = x.float() if linear_bias is None else x.float() + linear_bias.float()
    total = (total + residual.float()).to(x.dtype)
    return normalise(total, norm, config), total
