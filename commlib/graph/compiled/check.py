"""Checks of the backend's arguments, before anything is compiled."""

from collections.abc import Collection, Sequence
from operator import getitem
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from commlib.errors import GraphError
from commlib.graph.compiled.propagation import WRITES, NodeFailed, propagate
from commlib.graph.compiled.unsafe import unsafe_nodes

_CALLS = ("call_function", "call_method", "call_module")
_EXAMPLES = {"val", "example_value"}
_NO_DATA = (  # parts of errors about fakes
    "its data is not allocated yet",
    "is not supported for tensor subclasses",
    "Cannot access data pointer",
)


def check_graph(what: str, gm: Any, example_inputs: Any, *, runs_graph: bool = False) -> str | None:
    """Raise ``GraphError`` for what is not a graph, or for inputs that are not its own.

    Every node knows what it gives afterwards, so that unsafe ones are found. Returns why all of it
    must run eagerly, if the host reads a value inside of a node.

    ``runs_graph``: a graph of Dynamo runs as it is, and its nodes know what they write too.
    """
    if not isinstance(gm, GraphModule):
        raise GraphError(
            f"{what}({type(gm).__name__}): expected a torch.fx.GraphModule; pass a module to "
            f"torch.compile(module, backend=commlib.graph.backend), or trace it (make_fx)"
        )
    if not isinstance(example_inputs, (list, tuple)):
        raise GraphError(
            f"{what}: example_inputs is a {type(example_inputs).__name__}; expected a list or "
            f"tuple of the graph's inputs"
        )
    nodes = gm.graph.find_nodes(op="placeholder")
    if len(nodes) != len(example_inputs):
        raise GraphError(
            f"{what}: {len(example_inputs)} example inputs; expected {len(nodes)}: "
            f"{', '.join(node.name for node in nodes)}"
        )
    for node, value in zip(nodes, example_inputs, strict=True):
        _check_input(what, node, value)
    names = ("val",) if runs_graph else ("val", "example_value")
    is_new = any(node.meta.keys().isdisjoint(names) for node in nodes)
    if is_new or (runs_graph and any(map(_writes_unseen, gm.graph.nodes))):
        return _propagate(what, gm, example_inputs)
    return None


def _writes_unseen(node: Node) -> bool:
    """Return True if a node may write to tensors, and nothing tells to which."""
    has_schema = isinstance(node.target, (OpOverload, HigherOrderOperator))
    if node.op not in _CALLS or has_schema or node.target is getitem or WRITES in node.meta:
        return False
    values = tree_leaves([x.meta.get("val") for x in node.all_input_nodes])
    return node.op == "call_module" or any(isinstance(x, torch.Tensor) for x in values)


def check_static(static: Any, example_inputs: Sequence[Any]) -> None:
    """Raise ``GraphError`` for static inputs that are not tensors of the graph."""
    if not isinstance(static, Collection):
        raise GraphError(f"static_inputs={static!r:.60}: expected a list of positions")
    for i in static:
        is_number = isinstance(i, int) and not isinstance(i, bool)
        inside = is_number and 0 <= i < len(example_inputs)
        if not inside or not isinstance(example_inputs[i], torch.Tensor):
            value = repr(example_inputs[i])[:40] if inside else f"one of {len(example_inputs)}"
            raise GraphError(
                f"static_inputs={list(static)}: input {i} is {value}; expected positions of tensors"
            )
    if len(set(static)) < len(static):
        raise GraphError(f"static_inputs={list(static)}: expected each position once")


def _check_input(what: str, node: torch.fx.Node, value: Any) -> None:
    """Compare an input with what the graph was traced with, where this is known."""
    traced = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(traced, torch.Tensor):
        return
    if not isinstance(value, torch.Tensor):
        raise GraphError(
            f"{what}: example input {node.name} is {value!r:.40}; the graph was traced with "
            f"{_text(traced)}"
        )
    fits = len(traced.shape) == len(value.shape) and all(
        not isinstance(a, int) or not isinstance(b, int) or a == b
        for a, b in zip(traced.shape, value.shape, strict=True)
    )
    if not fits or traced.dtype != value.dtype or traced.device.type != value.device.type:
        raise GraphError(
            f"{what}: example input {node.name} is {_text(value)}; the graph was traced with "
            f"{_text(traced)}"
        )


def _text(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device.type}"


def _propagate(what: str, gm: GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """Note at each node what it gives and writes; return why it must run eagerly otherwise."""
    is_traced = any(not _EXAMPLES.isdisjoint(node.meta) for node in gm.graph.nodes)
    try:
        propagate(gm, example_inputs)
    except NodeFailed as failed:
        if _needs_values(failed.error):
            return f"the host reads a value: {failed.reason}"
        if is_traced:  # it runs; if nothing is cut, its writes need not be known
            return f"what it writes is unknown: {failed.reason}" if unsafe_nodes(gm) else None
        if _has_attribute_until(failed.node, gm):
            return f"fakes can't run it: {failed.reason}"
        text = f"{what}: the graph can't run on these example inputs: {failed.error}"
        raise GraphError(text) from failed
    return None


def _needs_values(error: Exception) -> bool:
    """Return True if a node failed because fakes have no data."""
    from torch.fx.experimental.symbolic_shapes import (  # loads sympy
        GuardOnDataDependentSymNode,
        PendingUnbackedSymbolNotFound,
    )

    kinds = (
        *(DataDependentOutputException, DynamicOutputShapeException),
        *(GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound),
    )
    return isinstance(error, kinds) or any(text in str(error) for text in _NO_DATA)


def _has_attribute_until(last: Node, gm: GraphModule) -> bool:
    """Return True if a node or one before it is a module or an attribute of the graph."""
    for node in gm.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            return True
        if node is last:
            break
    return False
