"""The parts of an FX graph: those that graphs can hold, and those between them that run eagerly."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from commlib.graph.compiled.effects import copy_of_graph, with_own_tokens
from commlib.graph.compiled.part_symbols import give_symbols
from commlib.graph.compiled.sharing import Lost, find_lost_write
from commlib.graph.compiled.unsafe import unsafe_nodes

_FREE = ("placeholder", "get_attr", "output")  # they belong to no part


class Part(NamedTuple):
    """A part of a split graph.

    Attributes:
        name: What the split graph calls it.
        module: Its own graph, which returns a tuple.
        sources: For each of its inputs, the position of the input of the whole graph that it is, or
            None.
        values: Examples of that, as they were traced.
        why: Why it runs eagerly; None if a graph can hold it.
        is_single: Whether the split graph expects the one result itself in place of the tuple.
    """

    name: str
    module: GraphModule
    sources: list[int | None]
    values: list[Any]
    why: str | None
    is_single: bool


def reasons(gm: GraphModule) -> list[str]:
    """Return why a graph is cut, each reason once; nothing if all of it can be captured."""
    return [*dict.fromkeys(unsafe_nodes(gm).values())]


def lost_write(gm: GraphModule) -> Lost | None:
    """Return a write across cuts that replays would lose, if there is one."""
    unsafe = unsafe_nodes(gm)
    return find_lost_write(gm, _numbers(gm, unsafe), unsafe) if unsafe else None


def split(gm: GraphModule) -> tuple[GraphModule, list[Part]]:
    """Return a graph cut at its unsafe nodes, and its parts in order.

    The order of the operators stays, so that all ranks make their collectives in the same order.
    """
    from torch.fx.passes.split_module import split_module  # not needed by other programs

    gm = _with_returned_attributes(gm)
    gm, number = with_own_tokens(gm, lambda one: _numbers(one, unsafe_nodes(one)))
    unsafe = unsafe_nodes(gm)
    split_gm = split_module(gm, None, number.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    why: dict[str, str] = {}
    for node, reason in unsafe.items():
        why.setdefault(f"submod_{number[node]}", reason)
    calls = [node for node in split_gm.graph.nodes if node.op == "call_module"]
    for call in calls:
        missing = None if str(call.target) in why else give_symbols(split_gm, call)
        if missing is not None:
            why[str(call.target)] = missing
    split_gm.recompile()
    return split_gm, [_part(split_gm, node, why.get(str(node.target))) for node in calls]


def replace(whole: GraphModule, part: Part, run: Callable[[list[Any]], Any]) -> None:
    """Run ``run``, which gets a list and returns a tuple, in the place of a part."""
    setattr(whole, part.name, _Run(run, is_single=part.is_single))


class _Run(torch.nn.Module):
    """A callable as a part of a split graph."""

    def __init__(self, run: Callable[[list[Any]], Any], *, is_single: bool) -> None:
        super().__init__()
        self._run, self._is_single = run, is_single

    def forward(self, *args: Any) -> Any:
        """Run it."""
        outputs = self._run([*args])
        return outputs[0] if self._is_single else outputs


def _with_returned_attributes(gm: GraphModule) -> GraphModule:
    """Return a graph whose parts return the attributes that it returns; torch splits no other."""
    (output,) = gm.graph.find_nodes(op="output")
    if not any(node.op == "get_attr" for node in output.all_input_nodes):
        return gm
    gm = copy_of_graph(gm)
    (output,) = gm.graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        if node.op == "get_attr":
            with gm.graph.inserting_before(output):
                result = gm.graph.call_function(_itself, (node,))
            result.meta = dict(node.meta)
            output.replace_input_with(node, result)
    gm.recompile()
    return gm


def _itself(x: Any) -> Any:
    return x


def _numbers(gm: GraphModule, unsafe: dict[Node, str]) -> dict[Node, int]:
    """Return the number of the part of each node; an item of a result is where the result is."""
    numbers: dict[Node, int] = {}
    number, last = 0, False
    for node in gm.graph.nodes:
        if node.op in _FREE:
            numbers[node] = number
            continue
        source = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else None
        if isinstance(source, Node) and source.op not in _FREE:
            numbers[node] = numbers[source]
            continue
        number += (node in unsafe) != last
        numbers[node], last = number, node in unsafe
    return numbers


def _part(whole: GraphModule, call: Node, why: str | None) -> Part:
    name = str(call.target)
    module: GraphModule = getattr(whole, name)
    output = next(iter(module.graph.find_nodes(op="output")))
    is_single = not isinstance(output.args[0], (tuple, list))
    if why is None:
        if is_single:
            output.args = ((output.args[0],),)
            module.recompile()
        # The next part was traced with these strides.
        output.meta["user_visible_output_idxs"] = [*range(len(output.args[0]))]
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    positions = {x: i for i, x in enumerate(whole.graph.find_nodes(op="placeholder"))}
    return Part(name, module, [positions.get(x) for x in call.args], values, why, is_single)
