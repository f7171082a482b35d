"""Autograd nodes before outputs: whether one backward leaves another one possible."""

from collections.abc import Iterable
from typing import Any

import torch


def used_up(came: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Return True if no backward through ``others`` can follow one through ``came``.

    A backward frees what its nodes have saved, so a later one through such a node is an error.
    """
    gone = {node for node in _nodes(came) if _saves(node)}
    return all(not gone.isdisjoint(_nodes([other])) for other in others)


def _nodes(outs: Iterable[torch.Tensor]) -> set[Any]:
    """Return the nodes that a backward from ``outs`` goes through."""
    found: set[Any] = set()
    left = [out.grad_fn for out in outs]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [before for before, _ in node.next_functions]
    return found


def _saves(node: Any) -> bool:
    """Return True if a node has saved a tensor."""
    names = (name for name in dir(node) if name.startswith("_raw_saved"))
    return any(getattr(node, name) for name in names)
