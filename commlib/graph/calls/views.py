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


def views_among(leaves: Sequence[Any], given: Sequence[torch.Tensor]) -> dict[int, PartOf]:
    """Return, by identity, those leaves of a result that are plain views of another one.

    Copies of both would have separate memory: a write to one would not reach the other. Views of
    arguments, which are in ``given``, are left out.
    """
    sharing = dict[int, list[int]]()  # places by memory; what is returned twice has one
    seen = set[int]()
    for i, x in enumerate(leaves):
        plain = isinstance(x, torch.Tensor) and x.layout is torch.strided and not is_wrapper(x)
        if plain and id(x) not in seen:
            sharing.setdefault(x.untyped_storage()._cdata, []).append(i)
            seen.add(id(x))
    found = dict[int, PartOf]()
    for places in sharing.values():
        if len(places) > 1 and source_of(leaves[places[0]], given) is None:
            for i in places:
                part = _part_of(i, {j: leaves[j] for j in places})
                found |= {} if part is None else {id(leaves[i]): part}
    return found


def _part_of(i: int, sharing: dict[int, torch.Tensor]) -> PartOf | None:
    """Return a tensor as a view of the largest one that it can be a view of, if any.

    With gradients that is what it was made from; without, what has all of its memory.
    """
    leaf, sizes = sharing[i], dict[int, int]()
    first, last = _span(leaf)
    for j, x in sharing.items():
        start, end = _span(x)
        whole = start <= first and last <= end and x.numel() == end - start
        if leaf.requires_grad:
            possible = x is leaf._base and x.grad_fn is not None
        else:
            possible = end - start > last - first or j < i
        if j != i and whole and possible and x.requires_grad == leaf.requires_grad:
            sizes[j] = end - start
    for j in sorted(sizes, key=lambda j: (-sizes[j], j)):
        if is_plain_view(leaf, sharing[j]):
            offset = int(leaf.storage_offset() - sharing[j].storage_offset())
            return PartOf(j, leaf.size(), leaf.stride(), offset)
    return None


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Return the range of its elements in the memory."""
    start = int(x.storage_offset())
    steps = zip(x.size(), x.stride(), strict=True)
    return start, start + sum((n - 1) * step for n, step in steps) + 1 if x.numel() else start
