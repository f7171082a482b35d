"""The operators that a node of an FX graph calls, also those in wrappers and in sub-graphs.

AOTAutograd wraps an operator that writes to its arguments in ``auto_functionalized_v2``, and one
with ordered effects in ``with_effects``.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

_WITH_TOKEN = "with_effects"  # takes a token first, and returns the next one first
_WRAPPERS = ("auto_functionalized", "auto_functionalized_v2", _WITH_TOKEN)
_NO_CALLS = ("placeholder", "get_attr", "output")


class Call(NamedTuple):
    """A call of an operator.

    Attributes:
        node: The node that makes it, which may be in a sub-graph.
        op: The operator, or what else the node calls.
        args: Its positional arguments, without those of a wrapper.
        kwargs: Its keyword arguments. ``auto_functionalized_v2`` gives all by keyword, and the
            tensors that are written as a list.
    """

    node: Node
    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def inputs(self) -> list[Node]:
        """Return the nodes among its arguments; an effect token is not one of them."""
        nodes: dict[Node, None] = {}
        torch.fx.map_arg((self.args, dict(self.kwargs)), lambda node: nodes.setdefault(node))
        return [*nodes]

    @property
    def result(self) -> Any:
        """Return an example of its result, without an effect token."""
        value: Any = self.node.meta.get("val")
        has_token = _name(self.node.target) == _WITH_TOKEN and isinstance(value, (tuple, list))
        return value[1:] if has_token else value


def calls(gm: GraphModule, node: Node) -> Iterator[Call]:
    """Yield the calls that a node of a graph makes: its own, and those in its sub-graphs.

    Wrappers are left out. Other operators that take an operator are followed by that one.
    """
    if node.op in _NO_CALLS:
        return
    op, args = node.target, node.args
    while True:
        taken = [i for i, x in enumerate(args) if isinstance(x, (OpOverload, HigherOrderOperator))]
        takes = isinstance(op, HigherOrderOperator) and bool(taken)
        if not takes or _name(op) not in _WRAPPERS:
            yield Call(node, op, args, node.kwargs)
        if not takes:
            break
        op, args = args[taken[0]], args[taken[0] + 1 :]  # type: ignore[assignment]
    for part in _sub_graphs(gm, node):
        for each in part.graph.nodes:
            yield from calls(part, each)


def _sub_graphs(gm: GraphModule, node: Node) -> Iterator[GraphModule]:
    """Yield the graphs that a node takes, such as the branches of ``cond``, or that it calls."""
    names = [str(x.target) for x in node.all_input_nodes if x.op == "get_attr"]
    if node.op == "call_module":
        names.append(str(node.target))
    modules = dict(gm.named_modules(remove_duplicate=False)) if names else {}
    for name in names:
        if isinstance(part := modules.get(name), GraphModule):
            yield part


def _name(op: Any) -> str | None:
    """Return the name of an operator that takes operators or functions; None for all else."""
    return str(op.name()) if isinstance(op, HigherOrderOperator) else None
