"""Triton kernels of a block's ends: bias, dropout, residual and layer norm in one pass.

Only imported for tensors on a GPU. All arithmetic is float32. The order of all sums is fixed and
depends on no property of the GPU, so that all ranks get the same bits.
"""

# Triton ships no types, and its kernels are not Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

PROGRAMS = 132  # of the backward, one per multiprocessor of an H200; each adds up its own rows
ELEMENTS_PER_WARP = 512
WARPS = 4, 16
VARIES = ["rows", "threshold"]  # not the width: vectors of 16 bytes need its factor 16


def forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    shift: Tensor | None,
    seed: Tensor | None,
    rate: float,
    scale: float,
    eps: float,
    out: Tensor,
    total: Tensor | None,
    stats: Tensor | None,
) -> None:
    """Fill ``out`` and ``total`` [rows, width], ``stats`` [rows, 2]: see ``residual_norm``.

    ``stats``: mean and 1 / deviation of the rows; None: there is no norm. ``total``: None if no
    backward reads it.
    """
    rows, width = x.shape
    block = _block(width)
    with torch.cuda.device_of(x):
        _forward[(rows,)](
            x,
            bias,
            residual,
            weight,
            shift,
            seed,
            out,
            total,
            stats,
            width,
            _threshold(rate),
            scale,
            eps,
            BLOCK=block,
            num_warps=_warps(block),
        )


def backward(
    grad: Tensor,
    added: Tensor | None,
    total: Tensor | None,
    stats: Tensor | None,
    weight: Tensor | None,
    seed: Tensor | None,
    rate: float,
    scale: float,
    by_x: Tensor | None,
    by_total: Tensor | None,
    by_bias: Tensor | None,
    by_norm: Tensor | None,
) -> None:
    """Fill those gradients of ``residual_norm`` that are given.

    Args:
        grad: [rows, width], the gradient by the result.
        added: [rows, width], another gradient by the total; it is added to that of the norm.
        total, stats, weight, seed, rate, scale: As in ``forward``.
        by_x, by_total: [rows, width].
        by_bias: [1, width] float32.
        by_norm: [2, width] float32, by the weight and by the shift.
    """
    rows, width = grad.shape
    block, programs = _block(width), min(rows, PROGRAMS)
    sums = [
        None if by is None else by.new_empty((programs, *by.shape)) for by in (by_bias, by_norm)
    ]
    with torch.cuda.device_of(grad):
        _backward[(programs,)](
            grad,
            added,
            total,
            stats,
            weight,
            seed,
            by_x,
            by_total,
            *sums,
            rows,
            width,
            _threshold(rate),
            scale,
            BLOCK=block,
            num_warps=_warps(block),
        )
    for by, parts in zip((by_bias, by_norm), sums, strict=True):
        if by is not None and parts is not None:
            torch.sum(parts, 0, out=by)


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _warps(block: int) -> int:
    least, most = WARPS
    return min(max(block // ELEMENTS_PER_WARP, least), most)


def _threshold(rate: float) -> int:
    """Return the least of the random 32-bit integers whose elements are kept."""
    return min(round(rate * 2**32), 2**32 - 1) - 2**31


@triton.jit
def _kept(seed, row, threshold, BLOCK: tl.constexpr):
    """Return the mask of a row: four numbers per call of Philox, from the place of the elements."""
    QUARTER: tl.constexpr = BLOCK // 4
    a, b, c, d = tl.randint4x(tl.load(seed), row * QUARTER + tl.arange(0, QUARTER))
    first = tl.interleave(_is_kept(a, threshold), _is_kept(b, threshold))
    return tl.interleave(first, tl.interleave(_is_kept(c, threshold), _is_kept(d, threshold)))


@triton.jit
def _is_kept(number, threshold):
    return number.to(tl.int32, bitcast=True) >= threshold


@triton.jit(do_not_specialize=VARIES)
def _forward(
    x,
    bias,
    residual,
    weight,
    shift,
    seed,
    out,
    total,
    stats,
    width,
    threshold,
    scale,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        z += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    z *= scale
    if seed is not None:
        z = tl.where(_kept(seed, row, threshold, BLOCK), z, 0.0)
    if residual is not None:
        z += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    z = z.to(out.dtype.element_ty)
    if total is not None:
        tl.store(total + at, z, mask=inside)
    if stats is None:
        tl.store(out + at, z, mask=inside)
    else:
        z = z.to(tl.float32)
        mean = tl.sum(z, 0) / width
        centred = tl.where(inside, z - mean, 0.0)
        factor = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
        tl.store(stats + 2 * row, mean)
        tl.store(stats + 2 * row + 1, factor)
        y = centred * factor
        if weight is not None:
            y *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if shift is not None:
            y += tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=VARIES)
def _backward(
    grad,
    added,
    total,
    stats,
    weight,
    seed,
    by_x,
    by_total,
    by_bias,
    by_norm,
    rows,
    width,
    threshold,
    scale,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    bias_sum = tl.zeros((BLOCK,), tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    shift_sum = tl.zeros((BLOCK,), tl.float32)
    if weight is not None:
        factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = row * width + column
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if stats is not None:
            mean = tl.load(stats + 2 * row)
            factor = tl.load(stats + 2 * row + 1)
            z = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
            y = tl.where(inside, (z - mean) * factor, 0.0)
            weight_sum += g * y
            shift_sum += g
            if weight is not None:
                g *= factors
            of_all, along_y = tl.reduce((g, g * y), 0, _add_pairs)
            g = factor * (g - of_all / width - y * (along_y / width))
        if added is not None:
            g += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        if by_total is not None:
            tl.store(by_total + at, g.to(by_total.dtype.element_ty), mask=inside)
        g *= scale
        if seed is not None:
            g = tl.where(_kept(seed, row, threshold, BLOCK), g, 0.0)
        if by_x is not None:
            tl.store(by_x + at, g.to(by_x.dtype.element_ty), mask=inside)
        bias_sum += g
    if by_bias is not None:
        tl.store(by_bias + program * width + column, bias_sum, mask=inside)
    if by_norm is not None:
        by_norm += 2 * program * width + column
        tl.store(by_norm, weight_sum, mask=inside)
        tl.store(by_norm + width, shift_sum, mask=inside)
