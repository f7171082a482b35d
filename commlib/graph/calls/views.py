"""Tensors of a call or a result that are views of others."""

from collections.abc import Sequence
from typing import Any

import torch

from commlib.core.tensors import is_wrapper
from commlib.graph.calls.output_kinds import PartOf

# Nodes of views that `as_strided` can stand for: each element is in one place only.
_VIEWS = (
    "Alias", "AsStrided", "Diagonal", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze",
    "Swapaxes", "T", "Transpose", "UnsafeView", "Unsqueeze", "View",
)  # fmt: skip


def source_of(leaf: torch.Tensor, given: Sequence[torch.Tensor]) -> int | None:
    """Return the position of the tensor that a leaf is, or is a view of; None for other memory.

    Of several in one memory it is the one that the gradient of the leaf flows to.
    """
    key, end = leaf.untyped_storage()._cdata, None
    found = [i for i, x in enumerate(given) if x.untyped_storage()._cdata == key]
    if len(found) > 1:
        node = leaf.grad_fn
        while node is not None and len(node.next_functions) == 1:
            node = node.next_functions[0][0]
        end = getattr(node, "variable", None)
    found.sort(key=lambda i: (given[i] is not leaf, given[i] is not end))
    return found[0] if found else None


def is_plain_view(leaf: torch.Tensor, source: torch.Tensor) -> bool:
    """Return True if ``as_strided`` of ``source`` can stand for a tensor in its memory."""
    same = leaf.dtype == source.dtype
    same = same and leaf.is_conj() == source.is_conj() and leaf.is_neg() == source.is_neg()
    node, end = leaf.grad_fn, source.grad_fn
    while same and node not in (None, end) and type(node).__name__ != "AccumulateGrad":
        name = type(node).__name__.partition("Backward")[0]
        same = name in _VIEWS and len(node.next_functions) == 1
        node = node.next_functions[0][0]
    return same


def part_of(leaf: Any, leaves: Sequence[Any], given: Sequence[torch.Tensor]) -> PartOf | None:
    """Return which of the leaves of a result a tensor is a plain view of, if any.

    Copies of both would have separate memory: a write to one would not reach the other. A view of
    an argument in ``given`` is none of these.
    """
    if not _has_memory_of(leaf, leaf):
        return None
    place = next((i for i in _wholes(leaf, leaves) if is_plain_view(leaf, leaves[i])), None)
    if place is None or source_of(leaf, given) is not None:
        return None
    offset = int(leaf.storage_offset() - leaves[place].storage_offset())
    return PartOf(place, leaf.size(), leaf.stride(), offset)


def _wholes(leaf: torch.Tensor, leaves: Sequence[Any]) -> list[int]:
    """Return the places of tensors that a leaf may be a view of, the largest one first.

    With gradients that is what it was made from; without, what has all of its memory.
    """
    found, is_later = dict[int, int](), True
    for i, x in enumerate(leaves):
        if x is leaf:
            is_later = False
        elif _has_memory_of(leaf, x) and x.requires_grad == leaf.requires_grad:
            (start, end), (first, last) = _span(x), _span(leaf)
            covers = start <= first and last <= end and x.numel() == end - start
            larger = end - start > last - first or is_later
            if leaf.requires_grad:
                larger = x is leaf._base and getattr(x, "grad_fn", None) is not None
            if covers and larger:
                found[i] = end - start
    return sorted(found, key=lambda i: (-found[i], i))


def _has_memory_of(leaf: Any, x: Any) -> bool:
    """Return True for a plain tensor in the memory of ``leaf``."""
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or is_wrapper(x):
        return False
    same: bool = x.untyped_storage()._cdata == leaf.untyped_storage()._cdata
    return same


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Return the range of its elements in the memory."""
    start = int(x.storage_offset())
    steps = zip(x.size(), x.stride(), strict=True)
    return start, start + sum((n - 1) * step for n, step in steps) + 1 if x.numel() else start
