"""Static inputs of an FX graph: the same tensors at every call, such as parameters."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule, Node

_TANGENT = "tangents_"  # AOTAutograd's names of a backward's inputs
# Its names of the inputs of a function: of one with a gradient, counted from 1, and of another.
_TRAINED, _INFERRED = re.compile(r"primals_(\d+)"), re.compile(r"arg(\d+)_\d+")


def static_positions(gm: GraphModule, example_inputs: Sequence[Any], tokens: int = 0) -> list[int]:
    """Return the positions of static inputs.

    AOTAutograd's metadata contains those of its graphs; tangents are never static. Dynamo marks the
    static inputs of a graph. In other graphs they are the inputs that are parameters.

    Args:
        gm: The graph.
        example_inputs: Its inputs, or fakes of them.
        tokens: For a backward the ``effect_tokens`` of its forward.
    """
    nodes = gm.graph.find_nodes(op="placeholder")
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        pairs = zip(nodes, example_inputs, strict=True)
        result = [i for i, (x, value) in enumerate(pairs) if _is_marked(x) or _is_parameter(value)]
    else:
        static = set(metadata.static_input_indices)
        if is_backward(gm):
            tokens = tokens or len(metadata.tokens)
            sources = [_source(node, None, tokens) for node in nodes]
        else:
            tokens = effect_tokens(gm)
            sources = [_source(node, i, tokens) for i, node in enumerate(nodes)]
        result = [i for i, source in enumerate(sources) if source in static]
    return result


def is_backward(gm: GraphModule) -> bool:
    """Return True for a backward of AOTAutograd."""
    return any(x.name.startswith(_TANGENT) for x in gm.graph.find_nodes(op="placeholder"))


def effect_tokens(gm: GraphModule) -> int:
    """Return how many inputs of a forward precede the program's.

    Operators with ordered effects, such as collectives of rings, pass tokens. Inductor takes them
    out of the graph again, but the names of all other inputs still count them.
    """
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        return 0
    first = next(iter(gm.graph.find_nodes(op="placeholder")), None)
    number = None if first is None else _number(first)
    return len(metadata.tokens) or number or 0


def _source(node: Node, place: int | None, tokens: int) -> int | None:
    """Return the number of an input as AOTAutograd's static inputs count."""
    number = _number(node)
    if number is None:
        return place
    counted = _INFERRED.fullmatch(node.name) is not None and _counts_tokens()
    return number if counted else number - tokens


@cache
def _counts_tokens() -> bool:
    """Return True if static inputs count tokens where there is no gradient, as newer torch does.

    The function that adds the tokens then changes the numbers too.
    """
    from torch._functorch._aot_autograd import graph_capture_wrappers  # slow to import

    adds: Any = getattr(graph_capture_wrappers, "handle_effect_tokens_fn", None)
    return adds is not None and "static_input_indices" in adds.__code__.co_names


def _number(node: Node) -> int | None:
    """Return the number in an input's name, from 0 on."""
    trained, inferred = (each.fullmatch(node.name) for each in (_TRAINED, _INFERRED))
    if trained is not None:
        return int(trained[1]) - 1
    return None if inferred is None else int(inferred[1])


def _is_marked(node: Node) -> bool:
    return bool((node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"))


def _is_parameter(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter)
