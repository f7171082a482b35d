"""Triton kernels of the LAMB step: one program per piece of a parameter, no atomic sums.

Only imported for tensors on a GPU. All arithmetic is float32; the order of all sums is fixed.
"""

# Triton ships no types, and its kernels are not Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from typing import Any

import torch
import triton
import triton.language as tl

from commlib.ops.lamb.layout import ALIGNMENT
from commlib.ops.lamb.part import Part

Tensor = torch.Tensor

BLOCK = 1024


def update_moments(part: Part, gradient: Tensor, rule: Any, norms: Tensor) -> None:
    """Do what ``update.update_moments`` does."""
    low_norm = part.copy is not None and not rule.master_norm
    measured = part.copy if low_norm else part.weights
    buffers = gradient, part.exp_avg, part.exp_avg_sq, part.weights, measured, part.pieces
    numbers = part.firsts, rule.decays, rule.factors, rule.skip, norms
    _launch_moments(*buffers, *numbers, *rule.betas, rule.eps, part.first, len(part.params))


def update_weights(part: Part, rule: Any, ratios: Tensor) -> None:
    """Do what ``update.update_weights`` does."""
    if not len(part.pieces):
        return
    buffers = part.exp_avg, part.exp_avg_sq, part.weights, part.copy, part.pieces
    _launch_weights(*buffers, rule.decays, ratios, rule.factors, rule.skip, rule.eps)


# Operators of torch, because a capture learns from operators which memory is written.


@torch.library.custom_op("commlib_lamb::update_moments", mutates_args=("means", "squares", "norms"))
def _launch_moments(
    gradient: Tensor,
    means: Tensor,
    squares: Tensor,
    weights: Tensor,
    measured: Tensor,
    table: Tensor,
    firsts: Tensor,
    decays: Tensor,
    factors: Tensor,
    skip: Tensor,
    norms: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    first: int,
    parameters: int,
) -> None:
    sums = norms.new_empty((max(1, len(table)), 2))
    with torch.cuda.device(gradient.device):
        if len(table):
            _moments[(len(table),)](
                gradient,
                means,
                squares,
                weights,
                measured,
                table,
                decays,
                factors,
                skip,
                sums,
                *(beta1, 1 - beta1, beta2, 1 - beta2, eps),
                ALIGNED=ALIGNMENT,
                BLOCK=BLOCK,
                num_warps=4,
            )
        _norms[(parameters,)](sums, firsts, norms, first, BLOCK=128, num_warps=4)


@torch.library.custom_op("commlib_lamb::update_weights", mutates_args=("weights", "copies"))
def _launch_weights(
    means: Tensor,
    squares: Tensor,
    weights: Tensor,
    copies: Tensor | None,
    table: Tensor,
    decays: Tensor,
    ratios: Tensor,
    factors: Tensor,
    skip: Tensor,
    eps: float,
) -> None:
    with torch.cuda.device(weights.device):
        _weights[(len(table),)](
            means,
            squares,
            weights,
            weights if copies is None else copies,
            table,
            decays,
            ratios,
            factors,
            skip,
            eps,
            ALIGNED=ALIGNMENT,
            LOW=copies is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )


@triton.jit
def _direction(mean, square, weight, decay, first, second, eps):
    root = tl.sqrt_rn(tl.div_rn(square, second)) + eps
    return tl.div_rn(tl.div_rn(mean, first), root) + decay * weight


@triton.jit
def _moments(
    gradients,
    means,
    squares,
    weights,
    measured,
    table,
    decays,
    factors,
    skip,
    sums,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece = tl.program_id(0).to(tl.int64)
    start = tl.multiple_of(tl.load(table + 3 * piece), ALIGNED)
    count = tl.multiple_of(tl.load(table + 3 * piece + 1), ALIGNED)
    decay = tl.load(decays + tl.load(table + 3 * piece + 2))
    scale = tl.load(factors)
    first = tl.load(factors + 1)
    second = tl.load(factors + 2)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    direction_sum = tl.zeros((BLOCK,), tl.float32)
    if tl.load(skip) == 0:
        for begin in range(0, count, BLOCK):
            index = begin + tl.arange(0, BLOCK)
            inside = index < count
            at = start + index
            g = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32) * scale
            mean = tl.load(means + at, mask=inside, other=0.0) * beta1 + g * rest1
            square = tl.load(squares + at, mask=inside, other=0.0) * beta2 + g * g * rest2
            tl.store(means + at, mean, mask=inside)
            tl.store(squares + at, square, mask=inside)
            weight = tl.load(weights + at, mask=inside, other=0.0)
            direction = _direction(mean, square, weight, decay, first, second, eps)
            norm = tl.load(measured + at, mask=inside, other=0.0).to(tl.float32)
            weight_sum += norm * norm
            direction_sum += tl.where(inside, direction * direction, 0.0)
    tl.store(sums + 2 * piece, tl.sum(weight_sum, 0))
    tl.store(sums + 2 * piece + 1, tl.sum(direction_sum, 0))


@triton.jit(do_not_specialize=["first_parameter"])
def _norms(sums, firsts, norms, first_parameter, BLOCK: tl.constexpr):
    parameter = tl.program_id(0).to(tl.int64)
    begin = tl.load(firsts + parameter)
    end = tl.load(firsts + parameter + 1)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    direction_sum = tl.zeros((BLOCK,), tl.float32)
    for piece in range(begin, end, BLOCK):
        index = piece + tl.arange(0, BLOCK)
        inside = index < end
        weight_sum += tl.load(sums + 2 * index, mask=inside, other=0.0)
        direction_sum += tl.load(sums + 2 * index + 1, mask=inside, other=0.0)
    row = norms + 2 * (first_parameter + parameter)
    tl.store(row, tl.sum(weight_sum, 0))
    tl.store(row + 1, tl.sum(direction_sum, 0))


@triton.jit
def _weights(
    means,
    squares,
    weights,
    copies,
    table,
    decays,
    ratios,
    factors,
    skip,
    eps,
    ALIGNED: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(skip) == 0:
        piece = tl.program_id(0).to(tl.int64)
        start = tl.multiple_of(tl.load(table + 3 * piece), ALIGNED)
        count = tl.multiple_of(tl.load(table + 3 * piece + 1), ALIGNED)
        parameter = tl.load(table + 3 * piece + 2)
        decay = tl.load(decays + parameter)
        ratio = tl.load(ratios + parameter)
        first = tl.load(factors + 1)
        second = tl.load(factors + 2)
        for begin in range(0, count, BLOCK):
            index = begin + tl.arange(0, BLOCK)
            inside = index < count
            at = start + index
            mean = tl.load(means + at, mask=inside, other=0.0)
            square = tl.load(squares + at, mask=inside, other=0.0)
            weight = tl.load(weights + at, mask=inside, other=0.0)
            direction = _direction(mean, square, weight, decay, first, second, eps)
            weight -= ratio * direction
            tl.store(weights + at, weight, mask=inside)
            if LOW:
                tl.store(copies + at, weight.to(copies.dtype.element_ty), mask=inside)
