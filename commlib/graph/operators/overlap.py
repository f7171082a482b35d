"""Test whether two tensors share elements in memory."""

from collections.abc import Iterator, Sequence

import torch

from commlib.core.memory import span


def overlaps(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the positions of each two that overlap; most of many tensors are only sorted."""
    spans = [span(tensor) for tensor in tensors]
    open_ones: list[int] = []  # that reach beyond the begin of the present one
    for i in sorted(range(len(tensors)), key=lambda i: spans[i][0]):
        open_ones = [j for j in open_ones if spans[j][1] > spans[i][0]]
        yield from ((j, i) for j in open_ones if overlap(tensors[j], tensors[i]))
        open_ones.append(i)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return False if no element of a strided tensor can share memory with one of the other's.

    Slices of one tensor are distinguished where they have its strides: columns of rows are in each
    other's span without meeting.
    """
    (begin, end), (start, stop) = span(one), span(other)
    if end <= start or stop <= begin or begin == end or start == stop:
        return False
    if one.stride() != other.stride() or one.itemsize != other.itemsize:
        return True
    apart, rest = divmod(start - begin, one.itemsize)
    return rest != 0 or not any(_in_columns(one, other, apart, period) for period in one.stride())


def _in_columns(one: torch.Tensor, other: torch.Tensor, apart: int, period: int) -> bool:
    """Return True if both have separate columns of a table with ``period`` elements per row."""
    widths = []
    for tensor in (one, other):
        inner = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if period and stride % period == 0:
                continue  # from row to row
            inner += (size - 1) * stride
        widths.append(inner)
    column = apart % period if period else 0
    return widths[0] <= column and column + widths[1] <= period
