"""The sizes that a part of a split graph depends on, as inputs of that part."""

from typing import Any

import torch
from torch.fx import GraphModule, Node


def give_symbols(whole: GraphModule, call: Node) -> str | None:
    """Give a part each symbol that the sizes of its inputs depend on; return why one is missing.

    Inductor reads symbols from integers and plain sizes among the inputs. A part may get a tensor
    of ``2 * s`` rows alone. Its cache of code compares integers among the inputs alone.
    """
    from torch.fx.experimental.symbolic_shapes import free_symbols

    part: GraphModule = getattr(whole, str(call.target))
    inputs = part.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in inputs]
    symbols = {symbol for value in values if (symbol := _symbol(value)) is not None}
    for symbol in sorted(free_symbols([x for x in values if x is not None]) - symbols, key=str):
        source = _source(whole, call, symbol)
        if source is None:
            return f"its sizes depend on {symbol}, which no value before it has"
        with part.graph.inserting_after(inputs[-1]):
            inputs.append(part.graph.placeholder(f"size_{symbol}"))
        inputs[-1].meta["val"] = source.meta["val"]
        call.args = (*call.args, source)
    part.recompile()
    return None


def _source(whole: GraphModule, call: Node, symbol: Any) -> Node | None:
    """Return the node of a split graph that is a symbol; made of a tensor's size if need be."""
    sizes = None
    for node in whole.graph.nodes:
        if node is call:
            break
        value = _value(whole, node)
        if _symbol(value) == symbol:
            node.meta["val"] = value
            result: Node = node
            return result
        if sizes is None and isinstance(value, torch.Tensor):
            dims = [i for i, size in enumerate(value.size()) if _symbol(size) == symbol]
            sizes = (node, value, dims[0]) if dims else None
    if sizes is None:
        return None
    node, value, dim = sizes
    with whole.graph.inserting_before(call):
        size = whole.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
    size.meta["val"] = value.size(dim)
    return size


def _symbol(value: Any) -> Any:
    """Return the symbol that an integer is; None for all else, sums and products included."""
    if not isinstance(value, torch.SymInt):
        return None
    expression = value.node.expr
    return expression if expression.is_symbol else None


def _value(whole: GraphModule, node: Node) -> Any:
    """Return an example of what a node of a split graph gives: an input, or a result of a part."""
    if node.op == "placeholder" or "val" in node.meta:
        return node.meta.get("val")
    is_item = getattr(node.target, "__name__", "") == "getitem"
    item: Any = node.args if is_item else (node, 0)
    source, index = item
    if source.op != "call_module":
        return None
    part: GraphModule = getattr(whole, str(source.target))
    results: Any = next(iter(part.graph.find_nodes(op="output"))).args[0]
    if source is node and isinstance(results, (tuple, list)):
        return None
    result = results[index] if isinstance(results, (tuple, list)) else results
    return result.meta.get("val") if isinstance(result, Node) else None
