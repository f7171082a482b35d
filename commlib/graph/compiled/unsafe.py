"""Nodes of an FX graph that no graph of the device can hold, and why."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from commlib.graph.compiled.called import Call, calls
from commlib.graph.compiled.groups import is_collective, stock_group
from commlib.graph.operators.schema import OpCall
from commlib.graph.operators.unsupported import sync_reason

_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_NUMBERS = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)
_BRANCHES = ("cond", "while_loop", "while_loop_stack_output", "map_impl", "scan")
# They set a generator's state.
_HOST_RANDOM = ("run_and_save_rng_state", "run_with_rng_state", "run_dtensor_rng_op")
_HOST_CODE = ("print", "call_torchbind", "invoke_leaf_function")
_HOST = {  # operators without a schema
    **{kind: f"{kind} is steered by the host" for kind in (*_BRANCHES, *_HOST_RANDOM)},
    **{kind: f"{kind} runs on the host" for kind in _HOST_CODE},
}
_TOKENS = ("prims::_make_token", "prims::_sink_tokens")  # they order operators, and run nothing


def unsafe_nodes(gm: torch.fx.GraphModule) -> dict[torch.fx.Node, str]:
    """Return the nodes that must run outside graphs, with the reasons, in order."""
    device = device_of(gm)
    unsafe: dict[torch.fx.Node, str] = {}
    for node in gm.graph.nodes:
        whys = (_why(call, device) for call in calls(gm, node))
        why = _as_its_source(node, unsafe) or next(filter(None, whys), None)
        if why is not None:
            unsafe[node] = why
    return unsafe


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


def _why(call: Call, device: torch.device) -> str | None:
    op, name = call.op, str(call.op)
    if is_collective(call):
        group = stock_group(call)
        return None if group is None else f"{name} on {group} of torch.distributed"
    if _has_unbacked(call):
        return f"{name} has a shape that depends on values"
    if isinstance(op, torch._ops.HigherOrderOperator):
        return _HOST.get(op.name())
    if not isinstance(op, torch._ops.OpOverload) or op.name() in _TOKENS:
        return None
    if _UNSAFE is not None and _UNSAFE in op.tags:
        return f"{name} is tagged cudagraph_unsafe"
    if device.type != "cpu" and _is_on_host(call):
        return f"{name} works on the CPU"
    why = _sync(call, device)
    return None if why is None else f"{name}: {why}"


def _sync(call: Call, device: torch.device) -> str | None:
    """Return why an operator makes the host wait, from what its arguments are like."""
    node_args = call.args, dict(call.kwargs)
    args, kwargs = torch.fx.map_arg(node_args, lambda x: x.meta.get("val"))
    return sync_reason(OpCall(call.op, tuple(args), dict(kwargs)), device)


def _is_on_host(call: Call) -> bool:
    """Return True for an operator with CPU tensors, other than constants."""
    inputs = [x for node in call.inputs if not _is_constant(node) for x in _tensors(node)]
    results = [] if _is_constant(call.node) else _tensors_in(call.result)
    return any(x.device.type == "cpu" for x in (*inputs, *results))


def _is_constant(node: torch.fx.Node) -> bool:
    """Return True for a typed number, which compiled code contains as it is."""
    scalar = all(x.dim() == 0 for x in _tensors(node))
    return node.target in _NUMBERS and scalar and not node.all_input_nodes


def _has_unbacked(call: Call) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # loads sympy

    values = tree_leaves([x.meta.get("val") for x in (call.node, *call.inputs)])
    symbolic = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(free_unbacked_symbols(x) for x in values if isinstance(x, symbolic))


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    return _tensors_in(node.meta.get("val"))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
