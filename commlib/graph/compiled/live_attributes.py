"""Parameters, buffers and modules of an FX graph, in copies of the graph as it has them now."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

_ATTRIBUTES = ("get_attr", "call_module")


def has_attributes(gm: GraphModule) -> bool:
    """Return True if a graph uses attributes of its module."""
    return any(node.op in _ATTRIBUTES for node in gm.graph.nodes)


def follower(gm: GraphModule, *copies: GraphModule) -> list[Callable[[], None]]:
    """Return a function that gives copies the attributes that a graph has now, if they use any.

    Args:
        gm: The graph.
        copies: Copies or parts of it. Parts have underscores in the names of its modules.
    """
    targets = [str(node.target) for node in gm.graph.nodes if node.op in _ATTRIBUTES]
    sources = {name.replace(".", "_"): name for name in targets} | {x: x for x in targets}
    uses = {
        (copy, str(node.target)): sources[str(node.target)]
        for copy in copies
        for node in copy.graph.nodes
        if node.op in _ATTRIBUTES and _is_of(node, copy, gm, sources)
    }
    reads = [
        (copy, name, attrgetter(name), attrgetter(source)) for (copy, name), source in uses.items()
    ]

    def follow() -> None:
        for copy, name, get, get_live in reads:
            value = get_live(gm)
            if get(copy) is not value:
                _set(copy, name, value)

    return [follow] if reads else []


def _is_of(node: Node, copy: GraphModule, gm: GraphModule, sources: dict[str, str]) -> bool:
    """Return True if the attribute of a node is one of the graph, not a part of it."""
    name = str(node.target)
    return name in sources and attrgetter(name)(copy) is attrgetter(sources[name])(gm)


def _set(copy: GraphModule, name: str, value: Any) -> None:
    """Set an attribute of any kind, where one of another kind may be."""
    path, _, last = name.rpartition(".")
    owner: torch.nn.Module = copy.get_submodule(path)
    delattr(owner, last)
    setattr(owner, last, value)
