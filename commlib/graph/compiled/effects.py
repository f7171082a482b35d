"""Operators with ordered effects, such as collectives of rings, in FX graphs.

AOTAutograd wraps each in ``with_effects``, which takes a token and returns the next one. The nodes
of an FX graph run in their order anyway.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node


def with_plain_effects(gm: GraphModule) -> GraphModule:
    """Return a graph that calls operators with ordered effects directly, in the same order.

    No capture can observe what ``with_effects`` calls. Tokens are passed on unused.
    """
    if not _effects(gm):
        return gm
    copied = copy_of_graph(gm)
    for node in _effects(copied):
        node.target = _called
    copied.recompile()
    return copied


def with_own_tokens(
    gm: GraphModule, numbers: Callable[[GraphModule], dict[Node, int]]
) -> tuple[GraphModule, dict[Node, int]]:
    """Return a graph and its parts' numbers, where no token passes from one part to another.

    Inductor can't compile a part that gets a token. It makes and sinks them inside its graphs.

    Args:
        gm: The graph, which stays as it is.
        numbers: Returns the number of the part of each node.
    """
    effects = _effects(gm)
    if not effects or any(_is_input(node.args[0]) for node in effects):
        return gm, numbers(gm)
    copied = copy_of_graph(gm)
    number = numbers(copied)
    _sink_early(copied.graph, number)
    for node in _effects(copied):
        token = node.args[0]
        if isinstance(token, Node) and number[token] != number[node]:
            with copied.graph.inserting_before(node):
                fresh = copied.graph.call_function(torch.ops.prims._make_token.default)
            fresh.meta, number[fresh] = dict(token.meta), number[node]
            node.replace_input_with(token, fresh)
            _sink(copied.graph, token, number)
    copied.recompile()
    return copied, number


def _sink_early(graph: Graph, number: dict[Node, int]) -> None:
    """Sink each token in the part that makes it, not in that of the graph's last sink."""
    for sink in graph.find_nodes(op="call_function", target=torch.ops.prims._sink_tokens.default):
        tokens = list(sink.args[0])
        away = [token for token in tokens if number[token] != number[sink]]
        sink.args = ([token for token in tokens if token not in away],)
        for token in away:
            _sink(graph, token, number)
        if not sink.args[0]:
            graph.erase_node(sink)


def _sink(graph: Graph, token: Node, number: dict[Node, int]) -> None:
    with graph.inserting_after(token):
        sink = graph.call_function(torch.ops.prims._sink_tokens.default, ([token],))
    sink.meta["val"], number[sink] = None, number[token]


def _effects(gm: GraphModule) -> list[Node]:
    from torch._higher_order_ops.effects import with_effects  # slow to import

    return list(gm.graph.find_nodes(op="call_function", target=with_effects))


def copy_of_graph(gm: GraphModule) -> GraphModule:
    """Return a graph with the same nodes, which may be changed."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copied = GraphModule(gm, graph)
    for new, old in zip(copied.graph.nodes, gm.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    copied.meta = dict(gm.meta)
    return copied


def _is_input(token: object) -> bool:
    return isinstance(token, Node) and token.op == "placeholder"


def _called(token: object, op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return what ``with_effects`` does: the token and all results."""
    result = op(*args, **kwargs)
    return (token, *result) if isinstance(result, tuple) else (token, result)
