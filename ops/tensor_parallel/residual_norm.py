"""residual + dropout(x + bias), and its layer norm: one kernel in each direction, on GPUs.

The mask is not stored: forward and backward compute it from a seed. The seed is a tensor that the
default generator of the device draws, as a mask would be. So a checkpoint finds the same mask
again, each replay of a captured graph draws another one, and equal generators give equal masks.
"""

from typing import Any

import torch
from torch.autograd import forward_ad

from commlib.core.modes import depth, is_tracing
from commlib.core.tensors import has_memory
from commlib.ops.registered.library import once, register
from commlib.ops.tensor_parallel.blocks.steps import Dropout, LayerNorm
from commlib.ops.triton_support import has_triton

Tensor = torch.Tensor

NAME = "residual_norm"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 2**15  # a program holds a row in registers
SEEDS = 2**63 - 1


def has_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """Return True if the kernels support these tensors.

    They do not serve compiled code, whose compiler fuses the torch operators, nor forward-mode
    autograd, nor functions that a ``torch.func`` transform runs.
    """
    if torch.compiler.is_compiling() or not (x.is_cuda and has_triton()):
        return False
    tensors = [x, *(t for t in others if t is not None)]
    return (
        0 < x.shape[-1] <= WIDEST
        and x.numel() > 0
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
        and all(t.dtype in DTYPES and has_memory(t) for t in tensors)
    )


def residual_norm(
    x: Tensor, bias: Tensor | None, dropout: Dropout, residual: Tensor | None, norm: LayerNorm
) -> Tensor:
    """Return norm(residual + dropout(x + bias)); no norm if that is before the block.

    All but the random numbers is one kernel, and so is the backward but for its sums over
    programs. Sums and norm are float32; the sum is rounded once before the norm.

    Args:
        x: [..., E], the same on every rank.
        bias: [E].
        dropout: Of less than everything. Ranks whose generators are equal drop the same values.
        residual: The shape of ``x``.
        norm: The norm of the block.

    Returns:
        The shape of ``x``, in the widest dtype of ``x``, ``bias`` and ``residual``.
    """
    weight, shift, eps = (None, None, None) if norm.before else norm[1:]
    seed = torch.randint(SEEDS, (1,), device=x.device) if dropout.draws else None
    tensors = x, bias, residual, weight, shift
    arguments = *tensors, seed, dropout.rate, dropout.factor, eps
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        out: Tensor = _ResidualNorm.apply(*arguments)  # type: ignore[no-untyped-call]
        return out
    return _forward(*arguments, False)[0]


def norm_and_input(x: Tensor, norm: LayerNorm) -> tuple[Tensor, Tensor]:
    """Return norm(x), and ``x`` for the residual: the backward adds both gradients in its kernel.

    Args:
        x: [..., E].
        norm: A norm; its parameters may be float32.

    Returns:
        The normalised rows in the dtype of ``x``, and a view of ``x``.
    """
    normalised, same = _NormAndInput.apply(x, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
    return normalised, same


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, seed, ctx.rate, ctx.factor, ctx.eps = inputs
        out, total, stats = _forward(*inputs, True)
        ctx.save_for_backward(total, stats, tensors[3], seed)
        ctx.dtypes = [_dtype(x) for x in tensors]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        by_x, by_bias, by_residual, *by_norm = ctx.needs_input_grad[:5]
        total, stats, weight, seed = ctx.saved_tensors
        x_dtype, bias_dtype, residual_dtype, *norm_dtypes = ctx.dtypes
        normed = ctx.eps is not None
        drops = seed is not None or ctx.factor != 1
        # Otherwise the gradients by x and by the residual are one tensor.
        separate = by_x and (drops or x_dtype is not grad.dtype)
        if not (normed or drops or separate):
            by_total = grad.to(residual_dtype) if by_residual else None
            bias_grad = grad.flatten(0, -2).sum(0).to(bias_dtype) if by_bias else None
            return grad if by_x else None, bias_grad, by_total, *(None,) * 6
        before_norm = normed and (by_residual or (by_x and not separate))
        saved = (total, stats, weight) if normed else (None, None, None)
        wanted = x_dtype if separate else None, before_norm, by_bias, any(by_norm)
        outputs = _backward(grad, None, *saved, seed, ctx.rate, ctx.factor, *wanted)
        by_total = outputs[1] if normed else grad
        return (
            (outputs[0] if separate else by_total) if by_x else None,
            *_cast(outputs[2], [by_bias], [bias_dtype]),
            by_total.to(residual_dtype) if by_residual else None,
            *_cast(outputs[3], by_norm, norm_dtypes),
            *(None,) * 4,
        )


class _NormAndInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, shift: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        out, _, stats = _forward(x, None, None, weight, shift, None, 0.0, 1.0, eps, False)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, stats, weight)
        ctx.dtypes = _dtype(weight), _dtype(shift)
        return out, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, added = grads
        if grad is None:
            return added, None, None, None
        by_x, *by_norm = ctx.needs_input_grad[:3]
        wanted = None, by_x, False, any(by_norm)
        outputs = _backward(grad, added, *ctx.saved_tensors, None, 0.0, 1.0, *wanted)
        return (outputs[1] if by_x else None, *_cast(outputs[3], by_norm, ctx.dtypes), None)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel; as a registered op where a mode or a trace is to see it."""
    call: Any = _registered_op if depth() or is_tracing() else _run
    result: tuple[Tensor, Tensor, Tensor] = call(*arguments)
    return result


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the kernel as ``_forward`` does. The op raises if this is differentiated again."""
    call: Any = _grad_op if depth() or is_tracing() or torch.is_grad_enabled() else _grad_run
    result: tuple[Tensor, Tensor, Tensor, Tensor] = call(*arguments)
    return result


def _dtype(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


def _cast(sums: Tensor, needed: Any, dtypes: Any) -> list[Tensor | None]:
    """Return the rows of ``sums`` that are needed, in the dtypes of their parameters."""
    wanted = enumerate(zip(needed, dtypes, strict=True))
    return [sums[row].to(dtype, copy=True) if need else None for row, (need, dtype) in wanted]


def _rows(x: Tensor | None) -> Any:
    return None if x is None else x.reshape(-1, x.shape[-1]).contiguous()


def _results(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float | None, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the memory of the op's results; an empty tensor for one that nobody reads."""
    dtype = x.dtype
    for tensor in (bias, residual):
        dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    normed = eps is not None
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape if normed and keeps else 0, dtype=dtype),
        x.new_empty((x.shape[:-1].numel(), 2) if normed else 0, dtype=torch.float32),
    )


def _run(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    shift: Tensor | None,
    seed: Tensor | None,
    rate: float,
    factor: float,
    eps: float | None,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from commlib.ops.tensor_parallel import residual_norm_kernels as kernels

    out, total, stats = _results(x, bias, residual, eps, keeps)
    kernels.forward(
        _rows(x),
        _rows(bias),
        _rows(residual),
        _rows(weight),
        _rows(shift),
        seed,
        rate,
        factor,
        eps or 0.0,
        out,
        total if total.numel() else None,
        None if eps is None else stats,
    )
    return out, total, stats


def _fake(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, eps, keeps = rest
    return _results(x, bias, residual, eps, keeps)


def _gradients(
    grad: Tensor, x_dtype: torch.dtype | None, by_total: bool, by_bias: bool, by_norm: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the memory of the gradients; an empty tensor for one that is not needed."""
    width = grad.shape[-1]
    return (
        grad.new_empty(0 if x_dtype is None else grad.shape, dtype=x_dtype),
        grad.new_empty(grad.shape if by_total else 0),
        grad.new_empty((1, width) if by_bias else 0, dtype=torch.float32),
        grad.new_empty((2, width) if by_norm else 0, dtype=torch.float32),
    )


def _grad_run(
    grad: Tensor,
    added: Tensor | None,
    total: Tensor | None,
    stats: Tensor | None,
    weight: Tensor | None,
    seed: Tensor | None,
    rate: float,
    factor: float,
    *wanted: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from commlib.ops.tensor_parallel import residual_norm_kernels as kernels

    grads = _gradients(grad, *wanted)
    filled = [x if x.numel() else None for x in grads]
    if any(x is not None for x in filled):
        tensors = _rows(grad), _rows(added), _rows(total), stats, _rows(weight), seed
        kernels.backward(*tensors, rate, factor, *filled)
    return grads


def _grad_fake(grad: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients(grad, *rest[-4:])


_grad_op = register(
    f"{NAME}_grad(Tensor grad, Tensor? added, Tensor? total, Tensor? stats, Tensor? weight,"
    f" Tensor? seed, float rate, float factor, ScalarType? x_dtype, bool by_total, bool by_bias,"
    f" bool by_norm) -> (Tensor, Tensor, Tensor, Tensor)",
    _grad_run,
    _grad_fake,
    backward=once(NAME),
    ordered=False,
)
_registered_op = register(
    f"{NAME}(Tensor x, Tensor? bias, Tensor? residual, Tensor? weight, Tensor? shift, Tensor? seed,"
    f" float rate, float factor, float? eps, bool keeps) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    backward=once(NAME),
    ordered=False,
)
