"""Autograd nodes before outputs: whether one backward leaves another one possible."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from commlib.graph.calls.leaves import nodes_of


def used_up(came: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Return True if no backward through ``others`` can follow one through ``came``.

    A backward frees what its nodes have saved, so a later one through such a node is an error.
    """
    gone = {node for node in nodes_of(came) if _saves(node)}
    return all(not gone.isdisjoint(nodes_of([other])) for other in others)


# Whether a backward goes on to a node, and whether it keeps the graph for another one; where torch
# can't tell, as if there were another.
_will_run: Callable[[Any], bool] = getattr(
    torch._C, "_will_engine_execute_node", lambda node: False
)
retains: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def all_run(edges: Sequence[tuple[Any, int]]) -> bool:
    """Return True if the backward under way takes every way out of a node."""
    nodes = [node for node, _ in edges if node is not None]
    try:
        return all(map(_will_run, nodes))
    except RuntimeError:  # one is a leaf that autograd.grad has asked for
        return all(map(_is_taken, nodes))


def _is_taken(node: Any) -> bool:
    """Return True if the backward under way goes on to a node, or ends at it."""
    try:
        return _will_run(node)
    except RuntimeError:
        return True


def certainly_run(edges: Sequence[tuple[Any, int]]) -> bool:
    """Return True if the backward under way certainly goes on to all of some nodes."""
    try:
        nodes = [node for node, _ in edges]
        return None not in nodes and all(map(_will_run, nodes))
    except RuntimeError:  # a leaf that autograd.grad has asked for
        return False


def will_run(node: Any) -> bool:
    """Return True if the backward under way certainly goes on to a node."""
    try:
        return node is not None and _will_run(node)
    except RuntimeError:  # a leaf that autograd.grad has asked for
        return False


def _saves(node: Any) -> bool:
    """Return True if a node has saved a tensor."""
    names = (name for name in dir(node) if name.startswith("_raw_saved"))
    return any(getattr(node, name) for name in names)
