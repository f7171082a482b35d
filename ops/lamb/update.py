"""One LAMB step of a shard: moments, norms per parameter, and the weights."""

from typing import NamedTuple

import torch

from commlib.ops.lamb.part import Part
from commlib.ops.triton_support import has_triton

Tensor = torch.Tensor


class Rule(NamedTuple):
    """The numbers of one step.

    Attributes:
        betas: Decay of the two moments.
        eps: Summand of the denominator.
        master_norm: True takes norms of master weights, False of low-precision values.
        factors: [3] float32: factor of the gradient, and 1 - beta ** step for both moments.
        rates: [parameters] float32 learning rates.
        decays: [parameters] float32 weight decay.
        skip: [1] bool; True changes nothing.
    """

    betas: tuple[float, float]
    eps: float
    master_norm: bool
    factors: Tensor
    rates: Tensor
    decays: Tensor
    skip: Tensor


def update_moments(part: Part, gradient: Tensor, rule: Rule, norms: Tensor) -> None:
    """Update the moments of a shard, and fill its rows of ``norms``.

    Args:
        part: Buffers.
        gradient: [shard] reduced gradient.
        rule: The numbers of the step.
        norms: [parameters, 2] float32; squared norm of the weights and of the direction, as far
            as they are in this shard.
    """
    if _runs_kernels(gradient):
        from commlib.ops.lamb import lamb_kernels

        lamb_kernels.update_moments(part, gradient, rule, norms)
        return
    rows = norms[part.first : part.first + len(part.params)].zero_()
    if not part.segments:  # a shard of padding
        return
    gradient = gradient.float() * rule.factors[0]
    moments = ((part.exp_avg, gradient), (part.exp_avg_sq, gradient.square()))
    for (moment, value), beta in zip(moments, rule.betas, strict=True):
        moment.copy_(torch.where(rule.skip, moment, moment * beta + value * (1 - beta)))
    measured = part.weights
    if part.copy is not None and not rule.master_norm:
        measured = part.copy.float()
    for column, values in enumerate((measured, _direction(part, rule))):
        lengths = torch._foreach_norm(_pieces(part, values))
        for segment, length in zip(part.segments, lengths, strict=True):
            rows[segment.parameter, column] = length.square()


def update_weights(part: Part, rule: Rule, ratios: Tensor) -> None:
    """Subtract the direction times ``ratios`` [parameters] from the weights of a shard."""
    if _runs_kernels(part.weights):
        from commlib.ops.lamb import lamb_kernels

        lamb_kernels.update_weights(part, rule, ratios)
        return
    if not part.segments:
        return
    step = _direction(part, rule)
    torch._foreach_mul_(_pieces(part, step), _per_segment(part, ratios))
    part.weights.copy_(torch.where(rule.skip, part.weights, part.weights - step))
    if part.copy is not None:
        part.copy.copy_(torch.where(rule.skip, part.copy, part.weights))


def trust_ratios(norms: Tensor, rates: Tensor) -> Tensor:
    """Return the step size per parameter: its rate, times |weights| / |direction| if both are > 0.

    Args:
        norms: [parameters, 2] squared norms over all shards.
        rates: [parameters] learning rates.
    """
    weights, direction = norms.unbind(1)
    valid = (weights > 0) & (direction > 0)
    return torch.where(valid, rates * (weights / direction).sqrt(), rates)


def _direction(part: Part, rule: Rule) -> Tensor:
    """Return the bias-corrected mean over the root of the squares, plus the weight decay."""
    _, first, second = rule.factors.unbind()
    direction = (part.exp_avg / first).div_((part.exp_avg_sq / second).sqrt_().add_(rule.eps))
    decayed = torch._foreach_mul(_pieces(part, part.weights), _per_segment(part, rule.decays))
    torch._foreach_add_(_pieces(part, direction), decayed)
    return direction


def _pieces(part: Part, flat: Tensor) -> list[Tensor]:
    return [flat[start : start + length] for _, start, length in part.segments]


def _per_segment(part: Part, values: Tensor) -> list[Tensor]:
    return [values[part.first + segment.parameter] for segment in part.segments]


def _runs_kernels(x: Tensor) -> bool:
    return x.is_cuda and has_triton()
