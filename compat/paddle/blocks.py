"""The legacy blocks of a transformer: attention and feed-forward, with their gradients."""

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring_of
from commlib.errors import ArgumentError, ShapeError

Tensor = torch.Tensor

MODES = ("upscale_in_train", "downscale_in_infer")
LARGEST_EPSILON = 1e-3


def fused_attention(
    x: Tensor,
    qkv_weight: Tensor,
    linear_weight: Tensor,
    pre_layer_norm: bool = False,
    pre_ln_scale: Tensor | None = None,
    pre_ln_bias: Tensor | None = None,
    ln_scale: Tensor | None = None,
    ln_bias: Tensor | None = None,
    pre_ln_epsilon: float = 1e-05,
    qkv_bias: Tensor | None = None,
    linear_bias: Tensor | None = None,
    cache_kv: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_rate: float = 0.5,
    attn_dropout_rate: float = 0.5,
    ln_epsilon: float = 1e-05,
    training: bool = True,
    mode: str = "upscale_in_train",
    ring_id: int = -1,
    add_residual: bool = True,
    num_heads: int = -1,
    transpose_qkv_wb: bool = False,
    name: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return a self-attention block over the heads of all ranks.

    Source: operator ``fused_attention`` with the arguments of ``fused_multi_head_attention``. It
    runs on the current stream; ``ops.fused_attention`` has the formula.

    Args:
        x: [batch, tokens, width], the same on every rank.
        qkv_weight: [3, heads, head_dim, width] of this rank, or what ``transpose_qkv_wb`` says.
        linear_weight: [heads * head_dim, width] of this rank.
        pre_layer_norm: Normalise before the projection, with ``pre_ln_scale``, ``pre_ln_bias`` and
            ``pre_ln_epsilon``, instead of after the residual with the other three.
        pre_ln_scale: [width].
        pre_ln_bias: [width].
        ln_scale: [width].
        ln_bias: [width].
        pre_ln_epsilon: 0 to 1e-3.
        qkv_bias: [3, heads, head_dim], or [3 * heads * head_dim] with ``transpose_qkv_wb``.
        linear_bias: [width], added once.
        cache_kv: [2, batch, heads, positions, head_dim], earlier keys and values, for inference.
        attn_mask: Broadcast to [batch, heads, tokens, keys]. Floats are added to the scores; True
            and integers other than 0 allow.
        dropout_rate: As ``ops.fused_attention``.
        attn_dropout_rate: As ``ops.fused_attention``.
        ln_epsilon: 0 to 1e-3.
        training: False drops nothing.
        mode: "upscale_in_train" or "downscale_in_infer".
        ring_id: The ring; -1 for one rank that has all heads.
        add_residual: False needs ``pre_layer_norm``.
        num_heads: Heads of this rank, with ``transpose_qkv_wb``.
        transpose_qkv_wb: ``qkv_weight`` is [width, 3 * heads * head_dim].
        name: Ignored.

    Returns:
        [batch, tokens, width]; with ``cache_kv`` also a longer cache with the new keys and values.

    Raises:
        ArgumentError: An option is unknown, out of range, or needs another one.
        ShapeError: Without a ring, heads * head_dim is not the width of x.
        CommError: As ``ops.fused_attention``.
    """
    prefix = _where("fused_attention", ring_id)
    _check_options(prefix, mode, (pre_ln_epsilon, ln_epsilon), pre_layer_norm, add_residual)
    if transpose_qkv_wb:
        qkv_weight, qkv_bias = _transposed(prefix, qkv_weight, qkv_bias, num_heads)
    if ring_id == -1 and _has_dims(qkv_weight, 4):
        _, heads, head_dim, width = qkv_weight.shape
        if heads * head_dim != width:
            raise ShapeError(
                f"{prefix}: qkv_weight has shape {tuple(qkv_weight.shape)}; expected heads * "
                f"head_dim to be the width {width} without a ring; pass ring_id="
            )
    position, longer = 0, None
    if cache_kv is not None and _has_dims(cache_kv, 5) and _has_dims(x, 3):
        position, longer = cache_kv.shape[3], _longer(cache_kv, x.shape[1])
    if isinstance(attn_mask, Tensor) and not attn_mask.is_floating_point():
        attn_mask = attn_mask.bool()
    out: Tensor = ops.fused_attention(
        x,
        qkv_weight,
        linear_weight,
        ring_id,
        pre_layer_norm=pre_layer_norm,
        ln_weight=pre_ln_scale if pre_layer_norm else ln_scale,
        ln_bias=pre_ln_bias if pre_layer_norm else ln_bias,
        ln_eps=pre_ln_epsilon if pre_layer_norm else ln_epsilon,
        qkv_bias=qkv_bias,
        linear_bias=linear_bias,
        attn_mask=attn_mask,
        cache_kv=cache_kv if longer is None else longer,
        position=position,
        dropout_rate=dropout_rate,
        attn_dropout_rate=attn_dropout_rate,
        training=training,
        upscale_in_train=mode == "upscale_in_train",
        add_residual=add_residual,
    )
    return out if longer is None else (out, longer)


fused_multi_head_attention = fused_attention  # its name in paddle.incubate.nn.functional


def fused_feedforward(
    x: Tensor,
    linear1_weight: Tensor,
    linear2_weight: Tensor,
    linear1_bias: Tensor | None = None,
    linear2_bias: Tensor | None = None,
    ln1_scale: Tensor | None = None,
    ln1_bias: Tensor | None = None,
    ln2_scale: Tensor | None = None,
    ln2_bias: Tensor | None = None,
    dropout1_rate: float = 0.5,
    dropout2_rate: float = 0.5,
    activation: str = "relu",
    ln1_epsilon: float = 1e-05,
    ln2_epsilon: float = 1e-05,
    pre_layer_norm: bool = False,
    training: bool = True,
    mode: str = "upscale_in_train",
    ring_id: int = -1,
    add_residual: bool = True,
    name: str | None = None,
) -> Tensor:
    """Return a feed-forward block over the hidden units of all ranks.

    Source: operator ``fused_feedforward``. It runs on the current stream;
    ``ops.fused_feedforward`` has the formula.

    Args:
        x: [batch, tokens, width], the same on every rank.
        linear1_weight: [width, units] of this rank.
        linear2_weight: [units, width] of this rank.
        linear1_bias: [units] of this rank.
        linear2_bias: [width], added once.
        ln1_scale: [width], for ``pre_layer_norm``.
        ln1_bias: [width], for ``pre_layer_norm``.
        ln2_scale: [width], otherwise.
        ln2_bias: [width], otherwise.
        dropout1_rate: Dropout of the hidden units, 0 to 1.
        dropout2_rate: Dropout of the output, 0 to 1.
        activation: "relu" or "gelu".
        ln1_epsilon: 0 to 1e-3, for ``pre_layer_norm``.
        ln2_epsilon: 0 to 1e-3, otherwise.
        pre_layer_norm: Normalise before the first layer instead of after the residual.
        training: False drops nothing.
        mode: "upscale_in_train" or "downscale_in_infer".
        ring_id: The ring; -1 for one rank that has all units.
        add_residual: False needs ``pre_layer_norm``.
        name: Ignored.

    Returns:
        [batch, tokens, width].

    Raises:
        ArgumentError: An option is unknown, out of range, or needs another one.
        CommError: As ``ops.fused_feedforward``.
    """
    prefix = _where("fused_feedforward", ring_id)
    _check_options(prefix, mode, (ln1_epsilon, ln2_epsilon), pre_layer_norm, add_residual)
    return ops.fused_feedforward(
        x,
        linear1_weight,
        linear2_weight,
        ring_id,
        pre_layer_norm=pre_layer_norm,
        ln_weight=ln1_scale if pre_layer_norm else ln2_scale,
        ln_bias=ln1_bias if pre_layer_norm else ln2_bias,
        ln_eps=ln1_epsilon if pre_layer_norm else ln2_epsilon,
        linear1_bias=linear1_bias,
        linear2_bias=linear2_bias,
        activation=activation,
        dropout1_rate=dropout1_rate,
        dropout2_rate=dropout2_rate,
        training=training,
        upscale_in_train=mode == "upscale_in_train",
        add_residual=add_residual,
    )


def _where(name: str, ring_id: int) -> str:
    """Return the start of an error text; raises ``RingError`` for an unknown ring."""
    return f"{name} (ring_id=-1)" if ring_id == -1 else ring_of(name, ring_id)._describe(name)


def _check_options(
    where: str, mode: str, epsilons: tuple[float, float], before: bool, add_residual: bool
) -> None:
    if mode not in MODES:
        raise ArgumentError(
            f"{where}: mode={mode!r}; expected {' or '.join(map(repr, MODES))}; pass "
            f"mode={MODES[0]!r}"
        )
    for epsilon in epsilons:
        is_number = isinstance(epsilon, int | float) and not isinstance(epsilon, bool)
        if not is_number or not 0 <= epsilon <= LARGEST_EPSILON:
            raise ArgumentError(
                f"{where}: epsilon={epsilon!r}; expected 0 to {LARGEST_EPSILON}; pass 1e-5"
            )
    if not add_residual and not before:
        raise ArgumentError(
            f"{where}: add_residual=False with pre_layer_norm=False; expected a residual before "
            f"the layer norm; pass pre_layer_norm=True, or call the operator of commlib.ops"
        )


def _transposed(
    where: str, weight: Tensor, bias: Tensor | None, num_heads: int
) -> tuple[Tensor, Tensor | None]:
    """Return views of weight and bias in the shapes [3, heads, head_dim, width] and without it."""
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1:
        raise ArgumentError(
            f"{where}: transpose_qkv_wb=True with num_heads={num_heads!r}; expected the heads of "
            f"this rank, 1 or more; pass num_heads="
        )
    if not _has_dims(weight, 2) or weight.shape[1] % (3 * num_heads):
        actual = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ShapeError(
            f"{where}: qkv_weight is {actual}; expected [width, 3 * heads * "
            f"head_dim] for num_heads={num_heads}"
        )
    if bias is not None and not (_has_dims(bias, 1) and len(bias) == weight.shape[1]):
        actual = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ShapeError(
            f"{where}: qkv_bias is {actual}; expected ({weight.shape[1]},), the "
            f"columns of qkv_weight"
        )
    heads = 3, num_heads, weight.shape[1] // (3 * num_heads)
    return weight.t().view(*heads, weight.shape[0]), None if bias is None else bias.view(heads)


def _has_dims(x: object, dims: int) -> bool:
    """Return True for a tensor of ``dims`` dims; the checks of the operator refuse another."""
    return isinstance(x, Tensor) and x.dim() == dims


def _longer(cache: Tensor, tokens: int) -> Tensor:
    """Return a copy of a cache with room for more tokens."""
    return torch.cat([cache, cache.new_empty((*cache.shape[:3], tokens, cache.shape[4]))], 3)
