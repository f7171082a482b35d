"""fused_feedforward: a tensor-parallel feed-forward block with one all-reduce in each direction."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from commlib.errors import ArgumentError
from commlib.ops.arguments import Ring
from commlib.ops.tensor_parallel.blocks.checks import BlockChecks, Expected
from commlib.ops.tensor_parallel.blocks.ends import first_step, last_step
from commlib.ops.tensor_parallel.blocks.steps import Dropout, LayerNorm
from commlib.ops.tensor_parallel.column_linear import column_linear

Tensor = torch.Tensor

NAME = "fused_feedforward"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


def fused_feedforward(
    x: Tensor,
    linear1_weight: Tensor,
    linear2_weight: Tensor,
    ring_id: Ring = 0,
    *,
    pre_layer_norm: bool = False,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    ln_eps: float = 1e-05,
    linear1_bias: Tensor | None = None,
    linear2_bias: Tensor | None = None,
    activation: str = "relu",
    dropout1_rate: float = 0.0,
    dropout2_rate: float = 0.0,
    training: bool = True,
    upscale_in_train: bool = True,
    add_residual: bool = True,
    use_calc_stream: bool = True,
) -> Tensor:
    """Compute a feed-forward block whose hidden units are sharded over the ring.

    h = layer_norm(x) if ``pre_layer_norm`` else x; a = dropout1(activation(h @ linear1_weight +
    linear1_bias)); z = x + dropout2(all_reduce(a @ linear2_weight) + linear2_bias); the result is
    z if ``pre_layer_norm`` else layer_norm(z). Source: operator ``fused_feedforward``.

    The forward does one all_reduce, and the backward one: of the gradient by h, while the
    gradients by ``linear1_weight`` and ``linear1_bias`` are computed. Streams, the dropouts and
    ``torch.autocast`` are as in ``fused_attention``.

    Args:
        x: [B, S, E], float64, float32, float16 or bfloat16, the same on every rank. Other tensors
            have its dtype.
        linear1_weight: [E, F], the columns of this rank's F hidden units.
        linear2_weight: [F, E], the rows of these units.
        ring_id: The ring, its id or its name. -1: one rank has all units; nothing is reduced.
        pre_layer_norm: Normalise before the first layer instead of after the residual.
        ln_weight: [E], factor of the layer norm; may be float32. Default: 1.
        ln_bias: [E], added by the layer norm; may be float32. Default: 0.
        ln_eps: Added to the variance, >= 0.
        linear1_bias: [F]. Default: 0.
        linear2_bias: [E], the same on every rank; added once. Default: 0.
        activation: "relu" or "gelu" (with erf).
        dropout1_rate: Dropout of the hidden units, with other masks on other ranks.
        dropout2_rate: Dropout of the output, with the same mask on every rank.
        training: False drops nothing.
        upscale_in_train: Divide what is kept by 1 - rate. False: multiply by 1 - rate in inference.
        add_residual: Add x.
        use_calc_stream: Reduce on the caller's current stream. False: on the ring's stream.

    Returns:
        [B, S, E] of the dtype of ``x``. The host does not block on a GPU.

    Raises:
        RingError: The ring does not exist, or it has failed.
        ShapeError, DtypeError, DeviceError, ArgumentError: On this rank, before any launch.
    """
    checks = BlockChecks(NAME, ring_id)
    for role, rate in (("dropout1_rate", dropout1_rate), ("dropout2_rate", dropout2_rate)):
        checks.number(role, rate, 1)
    checks.number("ln_eps", ln_eps, math.inf)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ArgumentError(
            f"{checks.where}: activation={activation!r}; expected 'relu' or 'gelu'; pass "
            f"activation='gelu'"
        )
    checks.hidden(x)
    _check_layers(checks, x, linear1_weight, linear1_bias, linear2_weight, linear2_bias)
    spec = Expected((x.shape[2],), "[width], the same on every rank")
    checks.tensors(x, {"ln_weight": (ln_weight, spec), "ln_bias": (ln_bias, spec)}, norm="ln_")
    dropout1 = Dropout(dropout1_rate, training, upscale_in_train)
    dropout2 = Dropout(dropout2_rate, training, upscale_in_train)
    checks.generators(x, draws=dropout1.draws or dropout2.draws)
    norm = LayerNorm(pre_layer_norm, ln_weight, ln_bias, float(ln_eps))
    hidden, same = first_step(x, norm)
    hidden = column_linear(
        hidden, linear1_weight.t(), linear1_bias, checks.ring_id, use_calc_stream
    )
    units_out = dropout1.sharded(ACTIVATIONS[activation](hidden), 2, checks.ring_id)
    return last_step(
        units_out @ linear2_weight,
        linear2_bias,
        dropout2,
        same if add_residual else None,
        norm,
        checks.ring_id,
        use_calc_stream,
    )


def _check_layers(
    checks: BlockChecks,
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
) -> None:
    """Refuse weights and biases of other shapes than the units of this rank have."""
    width = x.shape[2]
    _, units = checks.weight("linear1_weight", weight1, x, "width, units")
    expected: dict[str, tuple[Tensor | None, Expected]] = {
        "linear1_weight": (weight1, Expected((width, units), "[width of x, units of this rank]")),
        "linear2_weight": (weight2, Expected((units, width), "[units of this rank, width of x]")),
        "linear1_bias": (bias1, Expected((units,), "[units of this rank]")),
        "linear2_bias": (bias2, Expected((width,), "[width], the same on every rank")),
    }
    checks.tensors(x, expected, norm="ln_")
