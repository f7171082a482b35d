"""Static inputs of an FX graph: the same tensors at every call, such as parameters."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule, Node

_TANGENT = "tangents_"  # AOTAutograd's names of a backward's inputs
_INPUT = re.compile(r"primals_(\d+)")


def static_positions(gm: GraphModule, example_inputs: Sequence[Any]) -> list[int]:
    """Return the positions of static inputs.

    AOTAutograd's metadata contains those of its graphs; tangents are never static. Dynamo marks the
    static inputs of a graph. In other graphs they are the inputs that are parameters.
    """
    nodes = gm.graph.find_nodes(op="placeholder")
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        pairs = zip(nodes, example_inputs, strict=True)
        found = [i for i, (x, value) in enumerate(pairs) if _is_marked(x) or _is_parameter(value)]
    else:
        forward = set(metadata.static_input_indices)
        backward = any(node.name.startswith(_TANGENT) for node in nodes)
        sources = map(_of_forward, nodes) if backward else range(len(nodes))
        found = [i for i, source in enumerate(sources) if source in forward]
    return found


def _of_forward(node: Node) -> int | None:
    """Return the position of the forward's input that a backward is given too."""
    found = _INPUT.fullmatch(node.name)
    return None if found is None else int(found[1]) - 1


def _is_marked(node: Node) -> bool:
    return bool((node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"))


def _is_parameter(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter)
