"""fused_attention: a tensor-parallel attention block with one all-reduce in each direction."""

import math
from typing import Any

import torch

from commlib.core.tensors import has_memory
from commlib.core.validation import overlaps_itself
from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.ops.arguments import Ring
from commlib.ops.tensor_parallel.attention import Cache, Masking, attend
from commlib.ops.tensor_parallel.blocks.checks import BlockChecks, Expected
from commlib.ops.tensor_parallel.blocks.ends import first_step, last_step
from commlib.ops.tensor_parallel.blocks.steps import Dropout, LayerNorm, position_in
from commlib.ops.tensor_parallel.column_linear import autocast_dtype, column_linear

Tensor = torch.Tensor

NAME = "fused_attention"


def fused_attention(
    x: Tensor,
    qkv_weight: Tensor,
    linear_weight: Tensor,
    ring_id: Ring = 0,
    *,
    pre_layer_norm: bool = False,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    ln_eps: float = 1e-05,
    qkv_bias: Tensor | None = None,
    linear_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    cache_kv: Tensor | None = None,
    position: int = 0,
    dropout_rate: float = 0.0,
    attn_dropout_rate: float = 0.0,
    training: bool = True,
    upscale_in_train: bool = True,
    add_residual: bool = True,
    num_heads: int | None = None,
    use_calc_stream: bool = True,
) -> Tensor:
    """Compute a self-attention block whose heads are sharded over the ring.

    h = layer_norm(x) if ``pre_layer_norm`` else x; a = attention of this rank's heads of h; z = x +
    dropout(all_reduce(a @ linear_weight) + linear_bias); the result is z if ``pre_layer_norm``
    else layer_norm(z). Source: operator ``fused_attention``.

    The forward does one all_reduce, and the backward one: of the gradient by h, while the
    gradients by ``qkv_weight`` and ``qkv_bias`` are computed. On GPUs one kernel in each direction
    does all that follows the sum, in float32. The result, the mask of the output dropout, and the
    gradients of whatever is not of single heads are the same on every rank. Under
    ``torch.autocast`` the products and the sum have its dtype.

    Args:
        x: [B, S, E], float64, float32, float16 or bfloat16, the same on every rank. Other tensors
            have its dtype.
        qkv_weight: [3, H, D, E], the weights of queries, keys and values of this rank's H heads.
        linear_weight: [H * D, E], the rows of the output projection for these heads.
        ring_id: The ring, its id or its name. -1: one rank has all heads; nothing is reduced.
        pre_layer_norm: Normalise before the projection instead of after the residual.
        ln_weight: [E], factor of the layer norm; may be float32. Default: 1.
        ln_bias: [E], added by the layer norm; may be float32. Default: 0.
        ln_eps: Added to the variance, >= 0.
        qkv_bias: [3, H, D]. Default: 0.
        linear_bias: [E], the same on every rank; added once. Default: 0.
        attn_mask: Broadcast to [B, H, S, K], with K keys: True, or 0 in a float mask, where a query
            may attend. A float mask is added to the scores. It has no gradient.
        is_causal: A token attends to itself and to earlier tokens, in addition to ``attn_mask``.
        cache_kv: [2, B, H, L, D], keys and values of earlier tokens, for inference. The new ones
            are stored from ``position`` on, and K is ``position`` + S; otherwise K is S.
        position: Number of tokens that ``cache_kv`` holds already.
        dropout_rate: Dropout of the projected output, with the same mask on every rank.
        attn_dropout_rate: Dropout of the attention probabilities, with other masks on other ranks.
            The probabilities are in memory then. Both draw from the default generator of the
            device, whose state must be the same on every rank (``torch.manual_seed``);
            FLAGS_comm_check=2 compares it.
        training: False drops nothing.
        upscale_in_train: Divide what is kept by 1 - rate. False: multiply by 1 - rate in inference.
        add_residual: Add x.
        num_heads: Heads of all ranks together, if they are to be checked.
        use_calc_stream: Reduce on the caller's current stream. False: on the ring's stream.

    Returns:
        [B, S, E] of the dtype of ``x``. The host does not block on a GPU.

    Raises:
        RingError: The ring does not exist, or it has failed.
        ShapeError, DtypeError, DeviceError, ArgumentError: On this rank, before any launch.
    """
    checks = BlockChecks(NAME, ring_id)
    for role, rate in (("dropout_rate", dropout_rate), ("attn_dropout_rate", attn_dropout_rate)):
        checks.number(role, rate, 1)
    checks.number("ln_eps", ln_eps, math.inf)
    biases = {"qkv_bias": qkv_bias, "linear_bias": linear_bias}
    norms = {"ln_weight": ln_weight, "ln_bias": ln_bias}
    _check_tensors(checks, x, qkv_weight, linear_weight, {**biases, **norms})
    heads = qkv_weight.shape[1]
    _check_heads(checks, heads, num_heads)
    cache = _checked_cache(checks, x, qkv_weight, cache_kv, position)
    keys = x.shape[1] + (0 if cache is None else cache.position)
    _check_mask(checks, attn_mask, x, (x.shape[0], heads, x.shape[1], keys))
    attn_dropout = Dropout(attn_dropout_rate, training, upscale_in_train)
    dropout = Dropout(dropout_rate, training, upscale_in_train)
    checks.generators(x, draws=attn_dropout.draws or dropout.draws)

    norm = LayerNorm(pre_layer_norm, ln_weight, ln_bias, float(ln_eps))
    bias = None if qkv_bias is None else qkv_bias.flatten()
    hidden, same = first_step(x, norm)
    qkv = column_linear(hidden, qkv_weight.flatten(0, 2), bias, checks.ring_id, use_calc_stream)
    shape = (*x.shape[:2], 3, heads, qkv_weight.shape[2])  # without -1, for an empty batch
    # Split before heads and tokens change places: the gradients are then written once, in order.
    q, k, v = (part.transpose(1, 2) for part in qkv.view(shape).unbind(2))
    masking = Masking(attn_mask, is_causal)
    context = attend((q, k, v), masking, cache, attn_dropout, checks.ring_id)
    return last_step(
        context @ linear_weight,
        linear_bias,
        dropout,
        same if add_residual else None,
        norm,
        checks.ring_id,
        use_calc_stream,
    )


def _check_tensors(
    checks: BlockChecks,
    x: Tensor,
    qkv_weight: Tensor,
    linear_weight: Tensor,
    rows: dict[str, Tensor | None],
) -> None:
    checks.hidden(x)
    _, heads, head_dim, _ = checks.weight("qkv_weight", qkv_weight, x, "3, heads, head_dim, width")
    width = x.shape[2]
    text = "[width], the same on every rank"
    checks.tensors(
        x,
        {
            "qkv_weight": (
                qkv_weight,
                Expected((3, heads, head_dim, width), "[3, heads, head_dim, width of x]"),
            ),
            "linear_weight": (
                linear_weight,
                Expected((heads * head_dim, width), "[heads * head_dim of this rank, width of x]"),
            ),
            "qkv_bias": (
                rows["qkv_bias"],
                Expected((3, heads, head_dim), "[3, heads, head_dim] of this rank's qkv_weight"),
            ),
            "linear_bias": (rows["linear_bias"], Expected((width,), text)),
            "ln_weight": (rows["ln_weight"], Expected((width,), text)),
            "ln_bias": (rows["ln_bias"], Expected((width,), text)),
        },
        norm="ln_",
    )


def _check_heads(checks: BlockChecks, heads: int, num_heads: int | None) -> None:
    _, size = position_in(checks.ring_id)
    if num_heads is None:
        return
    if isinstance(num_heads, bool) or not isinstance(num_heads, int):
        raise ArgumentError(
            f"{checks.where}: num_heads={num_heads!r}; expected an integer; pass the heads of all "
            f"ranks together, {heads * size}"
        )
    if num_heads < 1 or num_heads % size:
        raise ShapeError(
            f"{checks.where}: num_heads={num_heads}; expected a multiple of the ring's size "
            f"{size}; pass ring_id of a ring whose size divides the heads"
        )
    if heads * size != num_heads:
        raise ShapeError(
            f"{checks.where}: qkv_weight has {heads} heads; expected {num_heads // size}, which is "
            f"num_heads={num_heads} over {size} ranks; pass this rank's heads of the weight"
        )


def _checked_cache(
    checks: BlockChecks, x: Tensor, qkv_weight: Tensor, kv: Tensor | None, position: Any
) -> Cache | None:
    """Return the cache, if there is one, after checking that the new tokens fit in."""
    if isinstance(position, bool) or not isinstance(position, int) or position < 0:
        raise ArgumentError(
            f"{checks.where}: position={position!r}; expected a number of tokens from 0 on; pass "
            f"position=0 for an empty cache"
        )
    if kv is None:
        if position:
            raise ArgumentError(
                f"{checks.where}: position={position} without a cache; expected 0; pass cache_kv="
            )
        return None
    batch, tokens, _ = x.shape
    _, heads, head_dim, _ = qkv_weight.shape
    length = checks.weight("cache_kv", kv, x, "2, batch, heads, positions, head_dim")[3]
    expected = Expected((2, batch, heads, length, head_dim), "[2, batch, heads, positions, ...]")
    checks.tensors(x, {"cache_kv": (kv, expected)}, norm="ln_")
    dtype = autocast_dtype(x.device) or x.dtype
    if kv.dtype is not dtype:
        raise DtypeError(
            f"{checks.where}: cache_kv is {kv.dtype}; expected {dtype}, the dtype of the keys"
        )
    if has_memory(kv) and overlaps_itself(kv):
        raise ArgumentError(
            f"{checks.where}: cache_kv of shape {tuple(kv.shape)} and strides {kv.stride()} "
            f"overlaps itself; expected separate memory for each element, because the call "
            f"writes to it; pass cache_kv.contiguous()"
        )
    _check_positions(checks, length, position, tokens)
    if torch.is_grad_enabled() and (x.requires_grad or qkv_weight.requires_grad):
        raise ArgumentError(
            f"{checks.where}: cache_kv with tensors that require grad; a cache serves inference; "
            f"call it under torch.no_grad()"
        )
    return Cache(kv, position)


def _check_positions(checks: BlockChecks, length: int, position: int, tokens: int) -> None:
    """Refuse new tokens that do not fit into a cache of ``length`` positions."""
    if position > length:
        raise ArgumentError(
            f"{checks.where}: position={position}; expected 0 to {length}, the positions of "
            f"cache_kv; pass the number of tokens that it holds"
        )
    if position + tokens > length:
        raise ShapeError(
            f"{checks.where}: cache_kv has {length} positions; expected {position + tokens} or "
            f"more, for {tokens} tokens from position {position} on; allocate a larger cache_kv"
        )


def _check_mask(
    checks: BlockChecks, mask: Tensor | None, x: Tensor, shape: tuple[int, ...]
) -> None:
    if mask is None:
        return
    checks.readable("attn_mask", mask, x.device)
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise DtypeError(
            f"{checks.where}: attn_mask is {mask.dtype}; expected bool or a float dtype; pass "
            f"attn_mask.bool()"
        )
    dims = tuple(mask.shape)
    fits = len(dims) <= 4 and all(
        size in (1, most) for size, most in zip(dims[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ShapeError(
            f"{checks.where}: attn_mask has shape {dims}; expected one that broadcasts to "
            f"{shape}: [batch, heads of this rank, tokens, keys]"
        )
    if mask.requires_grad:
        raise ArgumentError(
            f"{checks.where}: attn_mask requires grad; its gradient would leave out the heads of "
            f"other ranks; pass attn_mask.detach()"
        )
