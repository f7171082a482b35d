"""Tensors of a result that are views: of arguments, of weights, and of others."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from commlib.graph.calls.leaves import source_of
from commlib.graph.calls.output_kinds import Alias, PartOf
from commlib.graph.operators.history import is_leaf, node_of
from commlib.graph.operators.layout import repeats

# Nodes of views that `as_strided` can stand for: each element is in one place only.
_VIEWS = (
    "Alias", "AsStrided", "Diagonal", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze",
    "Swapaxes", "T", "Transpose", "UnsafeView", "Unsqueeze", "View",
)  # fmt: skip
_SEVERAL = "Split", "SplitWithSizes", "Unbind"


def views_among(leaves: Sequence[Any], given: Sequence[torch.Tensor]) -> dict[int, PartOf]:
    """Return, by identity, those leaves of a result that are plain views of another one.

    Copies of both would have separate memory: a write to one would not reach the other. Views of
    arguments, which are in ``given``, are left out. Two with gradients, of which neither is made of
    the other, stay copies: gradients of each go to a tensor that is not returned.
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
            tensors = {i: leaves[i] for i in places}
            views |= {id(tensors[i]): part for i, part in _parts(tensors).items()}
    return views


def _parts(tensors: dict[int, torch.Tensor]) -> dict[int, PartOf]:
    """Return which tensors in one memory are views of which other ones."""
    wholes, parts = dict[int, torch.Tensor](), dict[int, PartOf]()
    for i in _wholes_first(tensors):
        part = _part_of(tensors[i], tensors, wholes)
        if part is None:
            wholes[i] = tensors[i]
        else:
            parts[i] = part
    return parts


def _wholes_first(tensors: dict[int, torch.Tensor]) -> list[int]:
    """Return the places of tensors in one memory, those that others can be a part of first.

    A tensor whose gradient goes nowhere is a part of one whose gradient does. A view comes after
    its base, and what is made of a tensor after that tensor. A tensor with gaps has no parts.
    """
    ids = {id(x) for x in tensors.values()}

    def rank(i: int) -> tuple[bool, bool, int, bool, int, int]:
        x = tensors[i]
        is_dead = not x.requires_grad or _ends_nowhere(x)
        return is_dead, not is_dense(x), -span(x), id(x._base) in ids, _number(x), i

    return sorted(tensors, key=rank)


def _part_of(
    leaf: torch.Tensor, tensors: dict[int, torch.Tensor], wholes: dict[int, torch.Tensor]
) -> PartOf | None:
    """Return a tensor as a view of another one, if it can be.

    With gradients that is the nearest one from which autograd has made it; without, the first of
    ``wholes`` that has all of its memory.
    """
    no_grad = leaf.requires_grad and _ends_nowhere(leaf)
    flows = leaf.requires_grad and not no_grad
    for i, x in _sources(leaf, tensors) if flows else wholes.items():
        made_here = x.grad_fn is not None or not (x.requires_grad or no_grad)
        if made_here and _covers(x, leaf) and is_plain_view(leaf, x):
            offset = int(leaf.storage_offset() - x.storage_offset())
            detached = x.requires_grad and not leaf.requires_grad
            later, number = no_grad and leaf.grad_fn is not None, _number(leaf) if flows else 0
            return PartOf(i, leaf.size(), leaf.stride(), offset, detached, no_grad, later, number)
    return None


def _sources(
    leaf: torch.Tensor, tensors: dict[int, torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the tensors to which the gradient of ``leaf`` flows, the nearest first."""
    by_edge = {(x.grad_fn, x.output_nr): i for i, x in tensors.items() if x.grad_fn is not None}
    for edge in _history(leaf):
        if edge in by_edge:
            yield by_edge[edge], tensors[by_edge[edge]]


def _history(x: torch.Tensor) -> Iterator[Any]:
    """Yield the edges over which the gradient of ``x`` flows back, up to a node with more inputs.

    An edge is a node and the number of one of its outputs.
    """
    node = x.grad_fn
    while node is not None and len(node.next_functions) == 1:
        yield node.next_functions[0]
        node = node.next_functions[0][0]


def _ends_nowhere(x: torch.Tensor) -> bool:
    """Return True for a view that requires grad, but was made where autograd was off."""
    if not x.requires_grad or x._base is None:
        return False
    edges = [*_history(x)]
    return x.grad_fn is None or (bool(edges) and edges[-1][0] is None)


def _covers(x: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Return True if a tensor has each element that another one has in the same memory."""
    start, first = leaf.storage_offset(), x.storage_offset()
    return bool(is_dense(x) and first <= start and start + span(leaf) <= first + span(x))


def _number(x: torch.Tensor) -> int:
    """Return the place of a tensor's node in the order of autograd."""
    return 0 if x.grad_fn is None else x.grad_fn._sequence_nr()


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


def is_plain_view(leaf: torch.Tensor, source: torch.Tensor, views: Sequence[str] = _VIEWS) -> bool:
    """Return True if ``as_strided`` of ``source`` can stand for a tensor in its memory.

    ``as_strided`` of a view is another function: its gradient is none where the view has gaps, and
    is divided where the tensor repeats elements. ``views``: the nodes that may be in between.
    """
    same = leaf.dtype == source.dtype and not (source.requires_grad and repeats(source))
    same = same and leaf.is_conj() == source.is_conj() and leaf.is_neg() == source.is_neg()
    node: Any = leaf.grad_fn
    end = source.grad_fn
    while same and not _is_end(node, end):
        name = type(node).__name__.partition("Backward")[0]
        same = name in views and len(node.next_functions) == 1
        node = node.next_functions[0][0]
        same = same and (name != "AsStrided" or _is_end(node, end))
    return same


def _is_end(node: Any, end: Any) -> bool:
    return node in (None, end) or type(node).__name__ == "AccumulateGrad"


def apart(leaf: torch.Tensor) -> torch.Tensor:
    """Return a tensor that the program can't change in place of ``leaf``.

    Torch gives up those of ``chunk`` and its like when their base is written, as a weight is.
    """
    base = leaf._base if node_of(leaf) else None
    if base is not None and is_leaf(base) and is_plain_view(leaf, base, (*_VIEWS, *_SEVERAL)):
        leaf = base.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
    return Alias(leaf).again()
