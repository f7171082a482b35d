"""Parameters, buffers and modules of an FX graph, in copies of the graph as it has them now."""

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

_ATTRIBUTES = ("get_attr", "call_module")
_KINDS = ("_parameters", "_buffers", "_modules")
_Entry = tuple[dict[str, Any], str, str, Any]  # the state of a module, a kind, a name, a value


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
    return [_Follower(gm, uses)] if uses else []


class _Follower:
    """Gives copies of a graph its attributes when it has others than before."""

    def __init__(self, gm: GraphModule, uses: dict[tuple[GraphModule, str], str]) -> None:
        """``uses``: for each copy and each name in it, what the graph calls the attribute."""
        self._gm, self._uses = gm, uses
        self._entries = _entries(gm, uses.values())

    def __call__(self) -> None:
        """Compare entries of modules, which takes much less time than to look names up."""
        for state, kind, name, value in self._entries or ():
            if state[kind].get(name) is not value:
                break
        else:
            if self._entries is not None:
                return
        for (copy, name), source in self._uses.items():
            value = attrgetter(source)(self._gm)
            if attrgetter(name)(copy) is not value:
                _set(copy, name, value)
        self._entries = _entries(self._gm, self._uses.values())


def _entries(gm: GraphModule, sources: Iterable[str]) -> list[_Entry] | None:
    """Return what leads to attributes of a graph; None if some are not entries of modules."""
    entries: dict[tuple[int, str], _Entry] = {}
    for source in sources:
        owner: Any = gm
        for name in source.split("."):
            state = vars(owner) if isinstance(owner, torch.nn.Module) else {}
            kind = next((x for x in _KINDS if name in state.get(x, ())), None)
            if kind is None or name in state:
                return None
            entries[id(owner), name] = state, kind, name, state[kind][name]
            owner = state[kind][name]
    return [*entries.values()]


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
