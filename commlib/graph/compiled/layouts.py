"""Layouts of the inputs of an FX graph, on which it depends which of its values share memory."""

from collections.abc import Iterable
from typing import Any

import torch


def layouts(values: Iterable[Any]) -> list[Any]:
    """Return what tells layouts apart: sizes, strides and types of tensors, and integers.

    Symbolic sizes are what they were in the trace.
    """
    return [_layout(x) if isinstance(x, torch.Tensor) else _number(x) for x in values]


def hint(n: Any) -> int | None:
    """Return a size as it was in the trace; None if that depends on values."""
    if isinstance(n, torch.SymInt):
        n = n.node.hint if n.node.has_hint() else None
    return n if isinstance(n, int) else None


def _layout(x: torch.Tensor) -> Any:
    steps = x.stride() if x.layout is torch.strided else ()
    kind = x.dtype, x.layout, x.is_conj(), x.is_neg()
    return [hint(n) for n in x.size()], [hint(n) for n in steps], kind


def _number(x: Any) -> int | None:
    return hint(x) if isinstance(x, (int, torch.SymInt)) else None
