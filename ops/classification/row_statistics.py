"""The statistics, softmax and gradient of the rows of one class shard, each in one pass.

On a GPU Triton kernels stream over the shard. On a CPU, in float64 and without Triton,
torch operators do it a block of rows at a time. So no temporary grows with the shard.
"""

from collections.abc import Iterator

import torch

from commlib.ops.classification.rows import IGNORED, Rows, accumulates_in, shift_of
from commlib.ops.triton_support import has_triton

Tensor = torch.Tensor

CPU_BLOCK, GPU_BLOCK = 2**18, 2**24  # elements of a temporary


def on_kernels(x: Tensor) -> bool:
    """Return True if the Triton kernels support ``x``."""
    return x.is_cuda and x.dtype is not torch.float64 and has_triton()


def statistics(rows: Rows, out: Tensor) -> None:
    """Fill ``out`` [3, rows]: maximum, sum of exponentials relative to it, logit of the target.

    The maximum of an empty shard is -inf and its sum 0; so are those of a shard of -inf. The logit
    of the target is the mean over its ids, with 0 for ids of other ranks.
    """
    if on_kernels(rows.x):
        from commlib.ops.classification import row_kernels

        row_kernels.statistics(rows, out)
        return
    for at, part in _blocks(rows):
        z = _logits(part)
        top = z.amax(1) if z.shape[1] else z.new_full((len(z),), -torch.inf)
        out[0, at] = top
        out[1, at] = (z - shift_of(top).unsqueeze(1)).exp_().sum(1)
    if rows.aim is None:
        out[2] = targets(rows).sum(1).div_(rows.columns.shape[1])
    else:
        out[2] = rows.aim.masked_fill(~rows.owned[:, 0], 0)


def targets(rows: Rows) -> Tensor:
    """Return ``x`` at the columns, 0 for columns of other ranks: [rows, ids]."""
    if not rows.x.shape[1]:
        return torch.zeros_like(rows.columns, dtype=accumulates_in(rows.x.dtype))
    logits: Tensor = rows.x.gather(1, rows.places).to(accumulates_in(rows.x.dtype))
    return logits.masked_fill_(~rows.owned, 0)


def softmax(rows: Rows, stats: Tensor) -> Tensor:
    """Return the softmax, [rows, classes], from ``stats`` [2, rows]: what to subtract, the sum."""
    return _pass(rows, stats, None)


def gradient(rows: Rows, stats: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the loss by ``x * scale`` times ``weight`` [rows]; ignored rows: 0."""
    return _pass(rows, stats, weight)


def _pass(rows: Rows, stats: Tensor, weight: Tensor | None) -> Tensor:
    out = torch.empty_like(rows.x, memory_format=torch.contiguous_format)
    if on_kernels(rows.x):
        from commlib.ops.classification import row_kernels

        row_kernels.rewrite(rows, stats, weight, out)
        return out
    if rows.x.shape[1]:
        for at, part in _blocks(rows):
            out[at] = _rewritten(part, stats[:, at, None], None if weight is None else weight[at])
    return out


def _rewritten(rows: Rows, stats: Tensor, weight: Tensor | None) -> Tensor:
    """Return the softmax or the gradient of one block."""
    shift, total = stats
    p: Tensor = (_logits(rows) - shift).exp_().div_(total)
    if weight is None:
        return p
    owned, places = rows.owned, rows.places
    p.scatter_add_(1, places, owned.to(p.dtype).div_(-rows.columns.shape[1]))
    if rows.slope is not None:
        at_target = p.gather(1, places)
        steep = torch.where(owned, at_target * rows.slope.unsqueeze(1), at_target)
        p.scatter_(1, places, steep)
    return p.mul_(weight.unsqueeze(1)).masked_fill_(rows.columns[:, :1] == IGNORED, 0)


def _logits(rows: Rows) -> Tensor:
    """Return the logits of one block; it may be a view of ``x``."""
    z = rows.x.to(accumulates_in(rows.x.dtype))
    if rows.aim is None or not z.shape[1]:
        return z
    z = z * rows.scale
    places = rows.places
    return z.scatter_(1, places, torch.where(rows.owned, rows.aim[:, None], z.gather(1, places)))


def _blocks(rows: Rows) -> Iterator[tuple[slice, Rows]]:
    """Cut the rows into blocks of a bounded number of elements."""
    count, classes = rows.x.shape
    step = max(1, (GPU_BLOCK if rows.x.is_cuda else CPU_BLOCK) // max(1, classes))
    for first in range(0, count, step):
        at = slice(first, first + step)
        tensors = (None if one is None else one[at] for one in (rows.aim, rows.slope))
        yield at, Rows(rows.x[at], rows.columns[at], rows.scale, *tensors)
