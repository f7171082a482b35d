"""Memory that values of an FX graph share across a cut, and that is written after it.

Parts of a cut graph return copies at a replay. Copies of two values have separate memory, unless
one is a plain view of the other.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from commlib.graph.calls.views import is_dense, span
from commlib.graph.compiled.called import calls
from commlib.graph.compiled.propagation import WRITES, shared, storages, written

_OUTSIDE = ("placeholder", "get_attr")  # the program has their memory too
# They return a view or a copy, as strides are, and a call may have other strides than the example.
_PERHAPS = ("reshape", "reshape_as", "contiguous", "flatten", "ravel")


class Lost(NamedTuple):
    """A write that a replay would lose.

    Attributes:
        reason: Which one, for reports.
        always: Whether this holds without gradients too, where plain views stay views.
    """

    reason: str
    always: bool


def find_lost_write(
    gm: GraphModule, number: dict[Node, int], unsafe: Iterable[Node]
) -> Lost | None:
    """Return a write that replays would lose if the graph were cut.

    Args:
        gm: The graph, whose nodes have examples of what they give.
        number: The number of the part of each node.
        unsafe: The nodes that run between graphs.
    """
    eager = {number[node] for node in unsafe}
    same = _joined(gm)
    values: dict[int, list[Node]] = {}
    for node in gm.graph.nodes:
        for storage in _memory(_example(node), same) if node.op != "output" else ():
            values.setdefault(storage, []).append(node)
    losses = [
        loss
        for node in gm.graph.nodes
        for storage in {_root(x, same) for x in _written(gm, node)}
        if (loss := _loss(node, values.get(storage, []), number, eager)) is not None
    ]
    return min(losses, key=lambda loss: not loss.always, default=None)


def _joined(gm: GraphModule) -> dict[int, int]:
    """Return memory that is, or may be, other memory: examples of some traces share none."""
    same: dict[int, int] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        for source in _sources(gm, node):
            roots = sorted(_memory(source, same))
            same |= {x: roots[0] for x in _memory(_example(node), same) if roots and x != roots[0]}
    return same


def _sources(gm: GraphModule, node: Node) -> Iterator[Any]:
    """Yield examples of the values in whose memory a node's value is, or may be."""
    if _name(node) == "getitem" and isinstance(node.args[1], int):
        items = _example(node.args[0]) if isinstance(node.args[0], Node) else None
        if isinstance(items, (tuple, list)):
            yield items[node.args[1]]
    if _name(node) in _PERHAPS and node.all_input_nodes:
        yield _example(node.all_input_nodes[0])
    for call in calls(gm, node):
        schema = getattr(call.op, "_schema", None)
        if schema is not None and any(x.alias_info is not None for x in schema.returns):
            for value in shared(schema, call.args, dict(call.kwargs)):
                yield [_example(x) for x in tree_leaves(value) if isinstance(x, Node)]


def _memory(value: Any, same: dict[int, int]) -> set[int]:
    return {_root(x, same) for x in storages(value)}


def _root(storage: int, same: dict[int, int]) -> int:
    while storage in same:
        storage = same[storage]
    return storage


def _written(gm: GraphModule, node: Node) -> set[int]:
    """Return the memory that a node writes to."""
    if WRITES in node.meta:
        noted: set[int] = node.meta[WRITES]
        return noted
    memory = set[int]()
    for call in calls(gm, node):
        for value in written(getattr(call.op, "_schema", None), call.args, dict(call.kwargs)):
            nodes = [x for x in tree_leaves(value) if isinstance(x, Node)]
            memory |= storages([_example(x) for x in nodes])
    return memory


def _loss(node: Node, values: list[Node], number: dict[Node, int], eager: set[int]) -> Lost | None:
    """Return what is lost if a node writes to the memory of these values, if anything."""
    part = number[node]
    crossing = [x for x in values if number[x] < part and _is_used_from(x, part, number)]
    handles = [x for x in values if x.op in _OUTSIDE or x in crossing]
    copied = [x for x in crossing if x.op not in _OUTSIDE and number[x] not in eager]
    if len(handles) < 2 or not copied:
        return None
    target = next((x for x in handles if x in node.all_input_nodes), handles[0])
    other = next(x for x in handles if x is not target)
    reason = f"{target} is written after a cut, and shares its memory with {other}"
    return Lost(reason, always=not _stay_views(values, number, eager))


def _is_used_from(node: Node, part: int, number: dict[Node, int]) -> bool:
    return any(user.op == "output" or number[user] >= part for user in node.users)


def _stay_views(values: list[Node], number: dict[Node, int], eager: set[int]) -> bool:
    """Return True if replays without gradients return plain views where the graph has views."""
    tensors = [x for node in values for x in _tensors(node)]
    first = tensors[0]
    alike = all(
        x.untyped_storage()._cdata == first.untyped_storage()._cdata
        and (x.dtype, x.is_conj(), x.is_neg()) == (first.dtype, first.is_conj(), first.is_neg())
        for x in tensors
    )
    if not alike or any(node.op in _OUTSIDE for node in values):
        return alike
    start = min(number[node] for node in values)
    if start in eager:
        return True
    leaving = [x for x in values if number[x] == start and _is_used_from(x, start + 1, number)]
    return _have_base([x for node in leaving for x in _tensors(node)])


def _have_base(tensors: list[torch.Tensor]) -> bool:
    """Return True if all are in the memory of the longest, which has no gaps."""
    if any(isinstance(n, torch.SymInt) for x in tensors for n in (*x.size(), *x.stride())):
        return False
    longest = max(tensors, key=span, default=None)
    if longest is None or not is_dense(longest):
        return longest is None
    first = longest.storage_offset()
    return all(
        first <= x.storage_offset() and x.storage_offset() + span(x) <= first + span(longest)
        for x in tensors
    )


def _tensors(node: Node) -> Iterator[torch.Tensor]:
    leaves = tree_leaves(_example(node))
    return (x for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided)


def _example(node: Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _name(node: Node) -> str:
    """Return the name of what a node calls, without the overload."""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]
