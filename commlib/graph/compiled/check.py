"""Checks of the backend's arguments, before anything is compiled."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx import GraphModule

from commlib.errors import GraphError
from commlib.graph.compiled.propagation import propagate


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
    if any(node.meta.keys().isdisjoint(names) for node in nodes):
        return _propagate(what, gm, example_inputs)
    return None


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
    """Note at each node what it gives and writes, unless that depends on a value."""
    from torch.fx.experimental.symbolic_shapes import (  # loads sympy
        GuardOnDataDependentSymNode,
    )

    try:
        propagate(gm, example_inputs)
    except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
        return f"the host reads a value: {_headline(error)}"
    except Exception as error:
        if any("example_value" in node.meta for node in gm.graph.nodes):  # Dynamo has run it
            return f"what it writes is unknown: {_headline(error)}"
        raise GraphError(f"{what}: the graph can't run on these example inputs: {error}") from error
    return None


def _headline(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
