"""Tensors of a result that are views of others."""

from collections.abc import Sequence
from typing import Any

import torch

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
        if type(x) is torch.Tensor and x.layout is torch.strided and id(x) not in seen:
            sharing.setdefault(x.untyped_storage()._cdata, []).append(i)
            seen.add(id(x))
    views = dict[int, PartOf]()
    for places in sharing.values():
        if len(places) > 1 and source_of(leaves[places[0]], given) is None:
            wholes: list[int] = []
            for i in _wholes_first({i: leaves[i] for i in places}):
                part = _part_of(leaves[i], {j: leaves[j] for j in wholes})
                if part is None:
                    wholes.append(i)
                else:
                    views[id(leaves[i])] = part
    return views


def _wholes_first(sharing: dict[int, torch.Tensor]) -> list[int]:
    """Return the places of tensors in one memory, those that others can be a part of first.

    A tensor without a history is a part of one with a history, and a view a part of its base. A
    tensor with gaps has no parts.
    """
    ids = {id(x) for x in sharing.values()}

    def rank(i: int) -> tuple[bool, bool, int, bool, int]:
        x = sharing[i]
        return x.grad_fn is None, not is_dense(x), -span(x), id(x._base) in ids, i

    return sorted(sharing, key=rank)


def _part_of(leaf: torch.Tensor, wholes: dict[int, torch.Tensor]) -> PartOf | None:
    """Return a tensor as a view of the first one that it can be a view of, if any.

    With gradients that is its base or another view of that; without, what has all of its memory.
    """
    start, end = leaf.storage_offset(), leaf.storage_offset() + span(leaf)
    for i, x in wholes.items():
        first, last = x.storage_offset(), x.storage_offset() + span(x)
        covers = first <= start and end <= last and is_dense(x)
        made_here = x.grad_fn is not None or not x.requires_grad
        if covers and made_here and _can_be_made_of(leaf, x):
            detached = x.requires_grad and not leaf.requires_grad
            no_grad = leaf.requires_grad and leaf.grad_fn is None
            return PartOf(i, leaf.size(), leaf.stride(), int(start - first), detached, no_grad)
    return None


def _can_be_made_of(leaf: torch.Tensor, x: torch.Tensor) -> bool:
    """Return True if the gradient of ``leaf`` may flow through ``x``, in the memory of both."""
    base = leaf._base
    if not leaf.requires_grad or x is base:
        return is_plain_view(leaf, x)
    if base is None or x._base is not base or base.grad_fn is None:
        return False
    return is_plain_view(leaf, base) and is_plain_view(x, base)


def span(x: torch.Tensor) -> int:
    """Return how many elements of the memory it spans."""
    steps = zip(x.size(), x.stride(), strict=True)
    return 1 + sum((n - 1) * step for n, step in steps) if x.numel() else 0


def is_dense(x: torch.Tensor) -> bool:
    """Return True if it has each element that it spans once; without an operator of torch."""
    expected = 1
    for step, n in sorted(zip(x.stride(), x.size(), strict=True)):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True
