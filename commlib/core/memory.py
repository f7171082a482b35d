"""The memory of tensors: where it begins and ends, and whether two tensors share any of it."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from commlib.core.tensors import has_memory

Span = tuple[int, int]  # addresses of the first byte and after the last


def span(tensor: torch.Tensor) -> Span:
    """Return where the bytes of a tensor begin and end."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return begin, begin + (last + 1) * tensor.itemsize


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if strided tensors have a byte in common, which columns of a table have not."""
    return np.shares_memory(_as_array(one), _as_array(other))


def _as_array(tensor: torch.Tensor) -> Any:
    """Return an array with the addresses of a tensor on any device; nothing reads its values."""
    return np.asarray(_Interface(tensor))


class _Interface:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{tensor.itemsize}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "data": (tensor.data_ptr(), True),
        }


@dataclass(slots=True)
class Use:
    """A tensor that a call reads or writes; ``what`` names it in errors."""

    tensor: torch.Tensor
    span: Span
    writes: bool
    what: str


class Uses:
    """The memory of calls that run at the same time.

    Uses whose spans meet are kept together, so that a call looks at those near its tensors only: a
    group may have thousands of calls.
    """

    def __init__(self) -> None:
        self._begins: list[int] = []  # of separate ranges of memory, sorted
        self._ends: list[int] = []
        self._uses: list[list[Use]] = []  # in each range

    def clash(self, tensor: torch.Tensor | None, *, writes: bool) -> Use | None:
        """Return a use that shares memory with a tensor where one of them is written."""
        if tensor is None or not tensor.numel() or not has_memory(tensor):
            return None
        begin, end = span(tensor)
        for uses in self._uses[self._met(begin, end)]:
            for use in uses:
                apart = use.span[1] <= begin or end <= use.span[0]
                if not apart and (writes or use.writes) and share_memory(tensor, use.tensor):
                    return use
        return None

    def add(self, tensor: torch.Tensor | None, *, writes: bool, what: str = "") -> None:
        """Add a use."""
        if tensor is None or not tensor.numel() or not has_memory(tensor):
            return
        begin, end = span(tensor)
        met = self._met(begin, end)
        uses = [use for several in self._uses[met] for use in several]
        uses.append(Use(tensor, (begin, end), writes, what))
        self._begins[met] = [min([begin, *self._begins[met]])]
        self._ends[met] = [max([end, *self._ends[met]])]
        self._uses[met] = [uses]

    def _met(self, begin: int, end: int) -> slice:
        """Return which ranges have bytes from ``begin`` to before ``end``."""
        return slice(bisect_right(self._ends, begin), bisect_left(self._begins, end))
