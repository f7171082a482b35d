"""Tensors of a result that are views of others."""

from collections.abc import Sequence
from typing import Any

import torch

from commlib.core.tensors import is_wrapper
from commlib.graph.calls.output_kinds import PartOf
from commlib.graph.calls.outputs import is_plain_view, source_of


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
