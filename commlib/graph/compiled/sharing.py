"""Memory that values of an FX graph share across a cut, and that is written after it.

Parts of a cut graph return copies at a replay. Copies of two values have separate memory, unless
one is a plain view of the other.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from commlib.graph.calls.views import is_dense, span
from commlib.graph.compiled.called import calls
from commlib.graph.compiled.layouts import hint
from commlib.graph.compiled.propagation import WRITES, shared, storages, written

_OUTSIDE = ("placeholder", "get_attr")  # the program has their memory too
# They return their input, a view or a copy: this depends on shapes, strides and types of the call.
_PERHAPS = (
    *("reshape", "reshape_as", "contiguous", "flatten", "ravel", "resolve_conj", "resolve_neg"),
    *("to", "type", "type_as", "float", "half", "bfloat16", "double"),
)
_MODULE = "call_module"  # returns whatever its module does then, which may be another one


class Lost(NamedTuple):
    """A write that a replay would lose.

    Attributes:
        reason: Which one, for reports.
        always: Whether all calls lose it.
        with_gradients: Whether calls with a backward lose it. Those whose inputs have other layouts
            than the examples may always do so.
    """

    reason: str
    always: bool
    with_gradients: bool


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
    levels = [_Sharing(gm, names) for names in ((), _PERHAPS, (*_PERHAPS, _MODULE))]
    losses = [_loss(node, _written(gm, node), levels, number, eager) for node in gm.graph.nodes]
    return max(filter(None, losses), key=lambda loss: loss[1:], default=None)


class _Sharing:
    """The values of a graph by their memory, as it is or may be."""

    def __init__(self, gm: GraphModule, perhaps: Sequence[str]) -> None:
        """``perhaps``: the names of nodes whose values may be in the memory of their inputs."""
        self._same = _joined(gm, perhaps)
        self._values: dict[int, list[Node]] = {}
        for node in gm.graph.nodes:
            for storage in _memory(_example(node), self._same) if node.op != "output" else ():
                self._values.setdefault(storage, []).append(node)

    def groups(self, memory: set[int]) -> list[list[Node]]:
        """Return the values that share each of these memories."""
        return [self._values.get(x, []) for x in sorted({_root(x, self._same) for x in memory})]

    def is_one(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if all are in one memory."""
        return len({_root(x.untyped_storage()._cdata, self._same) for x in tensors}) < 2


def _joined(gm: GraphModule, perhaps: Sequence[str]) -> dict[int, int]:
    """Return memory that is, or may be, other memory: examples of some traces share none."""
    same: dict[int, int] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        for source in _sources(gm, node, perhaps):
            roots = sorted(_memory(source, same))
            same |= {x: roots[0] for x in _memory(_example(node), same) if roots and x != roots[0]}
    return same


def _sources(gm: GraphModule, node: Node, perhaps: Sequence[str]) -> Iterator[Any]:
    """Yield examples of the values in whose memory a node's value is, or may be."""
    if _name(node) == "getitem" and isinstance(node.args[1], int):
        items = _example(node.args[0]) if isinstance(node.args[0], Node) else None
        if isinstance(items, (tuple, list)):
            yield items[node.args[1]]
    if node.op == _MODULE and _MODULE in perhaps:
        yield from map(_example, node.all_input_nodes)
    elif _name(node) in perhaps and node.all_input_nodes:
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


def _loss(
    node: Node,
    memory: set[int],
    levels: Sequence[_Sharing],
    number: dict[Node, int],
    eager: set[int],
) -> Lost | None:
    """Return what is lost if a node writes to a memory, if anything.

    ``levels`` are as the examples show it, for inputs of other layouts, and for other modules.
    """
    handles = [
        [x for values in level.groups(memory) for x in _handles(node, values, number, eager)]
        for level in levels
    ]
    shared_by = next(filter(None, handles), None)
    if shared_by is None:
        return None
    target = next((x for x in shared_by if x in node.all_input_nodes), shared_by[0])
    other = next(x for x in shared_by if x is not target)
    reason = f"{target} is written after a cut, and shares its memory with {other}"
    stay = all(
        _stay_views(values, number, eager, levels[0])
        for values in levels[0].groups(memory)
        if _handles(node, values, number, eager)
    )
    always = not stay or {*handles[1]} != {*handles[2]}
    return Lost(reason, always, with_gradients=bool(handles[0]))


def _handles(
    node: Node, values: list[Node], number: dict[Node, int], eager: set[int]
) -> list[Node]:
    """Return those of values in one memory that a write of a node must reach, if one is copied."""
    part = number[node]
    crossing = [x for x in values if number[x] < part and _is_used_from(x, part, number)]
    handles = [x for x in values if x.op in _OUTSIDE or x in crossing]
    copied = [x for x in crossing if x.op not in _OUTSIDE and number[x] not in eager]
    return handles if len(handles) > 1 and copied else []


def _is_used_from(node: Node, part: int, number: dict[Node, int]) -> bool:
    return any(user.op == "output" or number[user] >= part for user in node.users)


def _stay_views(
    values: list[Node], number: dict[Node, int], eager: set[int], sharing: _Sharing
) -> bool:
    """Return True if replays without gradients return plain views where the graph has views."""
    tensors = [x for node in values for x in _tensors(node)]
    alike = len({(x.dtype, x.is_conj(), x.is_neg()) for x in tensors}) < 2
    alike = alike and sharing.is_one(tensors)
    if not alike or any(node.op in _OUTSIDE for node in values):
        return alike
    start = min(number[node] for node in values)
    if start in eager:
        return True
    leaving = [x for x in values if number[x] == start and _is_used_from(x, start + 1, number)]
    if len({x.untyped_storage()._cdata for x in tensors}) > 1:  # the trace has lost the offsets
        return values[0] in leaving and all(_have_base([x]) for x in _tensors(values[0]))
    tensors = [x for node in leaving for x in _tensors(node)]
    return not tensors or _have_base(tensors)


def _have_base(tensors: list[torch.Tensor]) -> bool:
    """Return True if all are in the memory of the longest, which has no gaps."""
    plain = [_plain(x) for x in tensors]
    sized = [x for x in plain if x is not None]
    if len(sized) < len(plain):
        return False
    longest, first = max(sized, key=lambda each: span(each[0]))
    return is_dense(longest) and all(
        first <= start and start + span(x) <= first + span(longest) for x, start in sized
    )


def _plain(x: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Return a tensor with plain sizes, without data, and its offset; None if one is unknown."""
    hints = [hint(n) for n in (*x.size(), *x.stride(), x.storage_offset())]
    plain = [n for n in hints if n is not None]
    if len(plain) < len(hints):
        return None
    return torch.empty_strided(plain[: x.dim()], plain[x.dim() : -1], device="meta"), plain[-1]


def _tensors(node: Node) -> Iterator[torch.Tensor]:
    leaves = tree_leaves(_example(node))
    return (x for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided)


def _example(node: Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _name(node: Node) -> str:
    """Return the name of what a node calls, without the overload."""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]
