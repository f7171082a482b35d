"""Nodes of an FX graph that no graph of the device can hold, and why."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from commlib.graph.compiled.groups import is_collective, stock_group
from commlib.graph.operators.schema import OpCall
from commlib.graph.operators.unsupported import sync_reason

_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_HOST_RANDOM = ("run_and_save_rng_state", "run_with_rng_state")  # set a generator's state
_NUMBERS = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)
_BRANCHES = ("cond", "while_loop", "map_impl", "scan")
_TOKENS = ("prims::_make_token", "prims::_sink_tokens")  # they order operators, and run nothing


def unsafe_nodes(gm: torch.fx.GraphModule) -> dict[torch.fx.Node, str]:
    """Return the nodes that must run outside graphs, with the reasons, in order."""
    device = device_of(gm)
    found: dict[torch.fx.Node, str] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        why = _as_its_source(node, found) or _why(node, device)
        if why is not None:
            found[node] = why
    return found


def device_of(gm: torch.fx.GraphModule) -> torch.device:
    """Return the GPU that a graph works on, or the CPU."""
    devices = [x.device for node in gm.graph.nodes for x in _tensors(node)]
    return next((x for x in devices if x.type == "cuda"), torch.device("cpu"))


def _as_its_source(node: torch.fx.Node, unsafe: dict[torch.fx.Node, str]) -> str | None:
    """Return the reason of the node that a wait, or an item of a result, belongs to."""
    if getattr(node.target, "__name__", "") in ("getitem", "wait_tensor.default"):
        source = node.args[0]
        return unsafe.get(source) if isinstance(source, torch.fx.Node) else None
    return None


def _why(node: torch.fx.Node, device: torch.device) -> str | None:
    name = str(node.target)
    if is_collective(node):
        group = stock_group(node)
        return None if group is None else f"{name} on {group} of torch.distributed"
    if _has_unbacked(node):
        return f"{name} has a shape that depends on values"
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        kind = node.target.name()
        branches = kind in _BRANCHES
        return f"{kind} is steered by the host" if branches or kind in _HOST_RANDOM else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target.name() in _TOKENS:
        return None
    if _UNSAFE is not None and _UNSAFE in node.target.tags:
        return f"{name} is tagged cudagraph_unsafe"
    if device.type != "cpu" and _is_on_host(node):
        return f"{name} works on the CPU"
    why = _sync(node, device)
    return None if why is None else f"{name}: {why}"


def _sync(node: torch.fx.Node, device: torch.device) -> str | None:
    """Return why an operator makes the host wait, from what its arguments are like."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda x: x.meta.get("val"))
    return sync_reason(OpCall(node.target, tuple(args), dict(kwargs)), device)


def _is_on_host(node: torch.fx.Node) -> bool:
    """Return True for an operator with CPU tensors, other than constants."""
    nodes = [each for each in (node, *node.all_input_nodes) if not _is_constant(each)]
    return any(x.device.type == "cpu" for each in nodes for x in _tensors(each))


def _is_constant(node: torch.fx.Node) -> bool:
    """Return True for a typed number, which compiled code contains as it is."""
    scalar = all(x.dim() == 0 for x in _tensors(node))
    return node.target in _NUMBERS and scalar and not node.all_input_nodes


def _has_unbacked(node: torch.fx.Node) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # loads sympy

    values = [x for each in (node, *node.all_input_nodes) for x in _values(each)]
    symbolic = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(free_unbacked_symbols(x) for x in values if isinstance(x, symbolic))


def _values(node: torch.fx.Node) -> list[Any]:
    return tree_leaves(node.meta.get("val"))


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    return [x for x in _values(node) if isinstance(x, torch.Tensor)]
