"""The row kernels in Triton: statistics, softmax or gradient of a shard, and their combination.

Only imported for tensors on a GPU. All arithmetic is float32; offsets of rows are 64-bit.
"""

# Triton ships no types, and its kernels are not Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from commlib.ops.classification.rows import IGNORED, Rows, shift_of

Tensor = torch.Tensor

NOWHERE = tl.constexpr(IGNORED)
PROGRAMS = 512  # rows fewer than these are cut into parts, so that every multiprocessor has work
STATISTICS_BLOCK, REWRITE_BLOCK, COMBINE_BLOCK = 8192, 4096, 128
LEAST = 2 * STATISTICS_BLOCK  # classes in a part
VARIES = ["rows", "size", "width", "offset", "total_classes", "ignore_index"]


def statistics(rows: Rows, out: Tensor) -> None:
    """Fill ``out`` [3, rows] as ``row_statistics.statistics`` does."""
    count, classes = rows.x.shape
    if not count:
        return
    x = _lined_up(rows.x)
    splits = max(1, min(PROGRAMS // count, triton.cdiv(classes, LEAST)))
    chunk = STATISTICS_BLOCK * triton.cdiv(triton.cdiv(classes, splits), STATISTICS_BLOCK)
    parts = out if splits == 1 else out.new_empty((splits, 2, count))
    with torch.cuda.device(x.device):
        _statistics[count, splits](
            x,
            rows.columns,
            x if rows.aim is None else rows.aim,
            parts,
            out[2],
            count,
            classes,
            x.stride(0),
            chunk,
            rows.scale,
            IDS=rows.columns.shape[1],
            AIMED=rows.aim is not None,
            BLOCK=STATISTICS_BLOCK,
            num_warps=16,
        )
    if splits > 1:
        top = torch.amax(parts[:, 0], 0, out=out[0])
        relative = (parts[:, 0] - shift_of(top)).exp_()
        torch.sum(relative.mul_(parts[:, 1]), 0, out=out[1])


def rewrite(rows: Rows, stats: Tensor, weight: Tensor | None, out: Tensor) -> None:
    """Fill ``out`` with the softmax, or with the gradient for the given weights."""
    count, classes = rows.x.shape
    if not count or not classes:
        return
    x = _lined_up(rows.x)
    with torch.cuda.device(x.device):
        _rewrite[count, triton.cdiv(classes, REWRITE_BLOCK)](
            x,
            out,
            stats,
            rows.columns,
            stats if weight is None else weight,
            stats if rows.aim is None else rows.aim,
            stats if rows.slope is None else rows.slope,
            count,
            classes,
            x.stride(0),
            rows.scale,
            IDS=rows.columns.shape[1],
            AIMED=rows.aim is not None,
            SLOPED=rows.slope is not None,
            GRADIENT=weight is not None,
            BLOCK=REWRITE_BLOCK,
            num_warps=8,
        )


def combine(
    every: Tensor,
    offset: int,
    ids: int,
    cosines: bool,
    total_classes: int,
    ignore_index: int | None,
    loss: Tensor,
    stats: Tensor,
    first_bad: Tensor,
) -> None:
    """Fill ``loss`` [rows], ``stats`` [2, rows] and lower ``first_bad`` [1] (int32).

    ``every``: [size, width] of float32, from every rank the labels as int64 bits, and from
    ``offset`` on its statistics, [3 or 4, rows].
    """
    size, count = every.shape[0], loss.numel()
    with torch.cuda.device(every.device):
        _combine[(triton.cdiv(count, COMBINE_BLOCK),)](
            every,
            every.view(torch.int64),
            loss,
            stats,
            first_bad,
            count,
            size,
            every.shape[1],
            offset,
            total_classes,
            0 if ignore_index is None else ignore_index,
            IDS=ids,
            IGNORES=ignore_index is not None,
            COSINES=cosines,
            BLOCK=COMBINE_BLOCK,
            num_warps=4,
        )


def _lined_up(x: Tensor) -> Tensor:
    """Return ``x`` with contiguous columns; any row stride is kept."""
    return x if x.stride(1) == 1 else x.contiguous()


@triton.jit(do_not_specialize=VARIES)
def _statistics(
    x,
    columns,
    aim,
    parts,
    target,
    rows,
    classes,
    stride,
    chunk,
    scale,
    IDS: tl.constexpr,
    AIMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    x += row * tl.cast(stride, tl.int64)
    if AIMED:
        column = tl.load(columns + row)
        column = tl.where((column >= 0) & (column < classes), column, -1)
        logit = tl.load(aim + row)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    first = tl.program_id(1) * chunk
    for begin in range(first, min(first + chunk, classes), BLOCK):
        index = begin + tl.arange(0, BLOCK)
        z = tl.load(x + index, mask=index < classes, other=float("-inf")).to(tl.float32)
        if AIMED:
            z = tl.where(index == column, logit, z * scale)
        higher = tl.maximum(top, tl.max(z, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift), 0)
        top = higher
    parts += split * 2 * rows + row
    tl.store(parts, top)
    tl.store(parts + rows, total)
    if split == 0:
        if AIMED:
            tl.store(target + row, tl.where(column >= 0, logit, 0.0))
        else:
            mean = tl.full((), 0.0, tl.float32)
            for number in range(IDS):
                column = tl.load(columns + row * IDS + number)
                owned = (column >= 0) & (column < classes)
                mean += tl.load(x + column, mask=owned, other=0.0).to(tl.float32)
            tl.store(target + row, mean / IDS)


@triton.jit(do_not_specialize=VARIES)
def _rewrite(
    x,
    out,
    stats,
    columns,
    weight,
    aim,
    slope,
    rows,
    classes,
    stride,
    scale,
    IDS: tl.constexpr,
    AIMED: tl.constexpr,
    SLOPED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < classes
    z = tl.load(x + row * tl.cast(stride, tl.int64) + index, mask=inside, other=0.0)
    z = z.to(tl.float32)
    column = tl.load(columns + row * IDS)
    if AIMED:
        z = tl.where(index == column, tl.load(aim + row), z * scale)
    p = tl.exp(z - tl.load(stats + row)) / tl.load(stats + rows + row)
    if GRADIENT:
        for number in range(IDS):
            p = tl.where(index == tl.load(columns + row * IDS + number), p - 1.0 / IDS, p)
        if SLOPED:
            p = tl.where(index == column, p * tl.load(slope + row), p)
        p = tl.where(column == NOWHERE, 0.0, p * tl.load(weight + row))
    out += row * tl.cast(classes, tl.int64)
    tl.store(out + index, p.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=VARIES)
def _combine(
    every,
    labels,
    loss,
    stats,
    first_bad,
    rows,
    size,
    width,
    offset,
    total_classes,
    ignore_index,
    IDS: tl.constexpr,
    IGNORES: tl.constexpr,
    COSINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    rank_step = tl.cast(width, tl.int64)
    step = tl.cast(rows, tl.int64)
    mine = every + offset + row
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for rank in range(size):
        top = tl.maximum(top, tl.load(mine + rank * rank_step, mask=inside, other=0.0))
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    target = tl.full((BLOCK,), 0.0, tl.float32)
    bad = row < 0
    ignored = row < 0
    for rank in range(size):
        part = mine + rank * rank_step
        highest = tl.load(part, mask=inside, other=0.0)
        total += tl.load(part + step, mask=inside, other=0.0) * tl.exp(highest - shift)
        target += tl.load(part + 2 * step, mask=inside, other=0.0)
        if COSINES:
            bad |= tl.abs(tl.load(part + 3 * step, mask=inside, other=0.0)) > 1.0
        for number in range(IDS):
            index = row * IDS + number
            first = tl.load(labels + index, mask=inside, other=0)
            label = tl.load(labels + rank * (rank_step // 2) + index, mask=inside, other=0)
            valid = (label >= 0) & (label < total_classes)
            if IGNORES:
                valid |= label == ignore_index
                ignored |= label == ignore_index
            bad |= (label != first) | (valid == 0)
    bad = bad & inside
    total = tl.where(bad, float("nan"), total)
    value = tl.where(ignored & (bad == 0), 0.0, tl.log(total) - (target - shift))
    tl.store(loss + row, value, mask=inside)
    tl.store(stats + row, shift, mask=inside)
    tl.store(stats + step + row, total, mask=inside)
    tl.atomic_min(first_bad, tl.min(tl.where(bad, row, rows), 0).to(tl.int32))
