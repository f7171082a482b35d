"""The two ends of a block: the layer norm before it, and what follows its last linear layer."""

import torch

from commlib.ops.collectives._all_reduce import all_reduce
from commlib.ops.tensor_parallel._all_reduce_residual_norm import DTYPES, all_reduce_residual_norm
from commlib.ops.tensor_parallel.blocks.steps import Dropout, LayerNorm, position_in
from commlib.ops.tensor_parallel.residual_norm import (
    has_kernels,
    norm_and_input,
    residual_norm,
)

Tensor = torch.Tensor


def first_step(x: Tensor, norm: LayerNorm) -> tuple[Tensor, Tensor]:
    """Return the input of the first linear layer, and ``x`` for the residual."""
    if not norm.before:
        return x, x
    if has_kernels(x, norm.weight, norm.bias):
        return norm_and_input(x, norm)
    return norm(x), x


def last_step(
    partial: Tensor,
    bias: Tensor | None,
    dropout: Dropout,
    residual: Tensor | None,
    norm: LayerNorm,
    ring_id: int,
    use_calc_stream: bool,
) -> Tensor:
    """Return norm(residual + dropout(all_reduce(partial) + bias)), with one all_reduce.

    ``partial``: [..., E], the product of this rank's part of a row-parallel linear layer. The bias
    and the residual are added once, after the sum. On GPUs one kernel does all but the sum;
    compiled code generates its own. ``all_reduce_residual_norm`` does the sum too, in inference.
    """
    reduces = position_in(ring_id)[1] > 1
    if reduces and residual is not None and _is_inference(partial, bias, dropout, residual, norm):
        assert norm.weight is not None  # checked there
        normalised, _ = all_reduce_residual_norm(
            partial,
            residual,
            norm.weight,
            ring_id,
            norm="layer",
            bias=norm.bias,
            linear_bias=bias,
            eps=norm.eps,
            use_calc_stream=use_calc_stream,
        )
        return normalised
    total = partial
    if reduces:
        total = all_reduce(partial, ring_id, backward="identity", use_calc_stream=use_calc_stream)
    if dropout.leaves_some and has_kernels(total, bias, residual, norm.weight, norm.bias):
        return residual_norm(total, bias, dropout, residual, norm)
    out = dropout.replicated(total if bias is None else total + bias)
    if residual is not None:
        out = out + residual
    return out if norm.before else norm(out)


def _is_inference(
    partial: Tensor, bias: Tensor | None, dropout: Dropout, residual: Tensor, norm: LayerNorm
) -> bool:
    """Return True if ``all_reduce_residual_norm`` gives the result: one dtype, no gradient."""
    if norm.before or norm.weight is None or partial.dtype not in DTYPES:
        return False
    if dropout.rate and (dropout.training or not dropout.upscale):
        return False
    tensors = [t for t in (partial, bias, residual, norm.weight, norm.bias) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return all(t.dtype is partial.dtype for t in tensors)
