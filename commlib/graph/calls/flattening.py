"""The arguments of a call as leaves and a structure: containers are opened, and dataclasses too.

A dataclass that holds tensors is opened by its attributes: tensors in it are tensors of the call,
and plain values are in its key. The runs after the first call get a separate object.

A dataclass without tensors is a leaf, and all runs get the caller's own object. In the key it
counts by content, or as itself where its class compares by identity.
"""

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence, Set
from functools import cache
from typing import Any, NamedTuple

from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_map,
    tree_unflatten,
)

from commlib.errors import GraphError
from commlib.graph.calls.key_values import value
from commlib.graph.calls.openable import (
    NAMESPACES,
    PLAIN,
    can_open,
    counts_as_itself,
    is_hashable,
    look,
)
from commlib.graph.python.reach import attributes

_LISTS = (list, deque)
_DICTS = (dict, OrderedDict, defaultdict)
_rebuilding = threading.local()  # ``made``: the opened objects of one call that are made so far


class Flat(NamedTuple):
    """The arguments of a call, flattened.

    Attributes:
        leaves: Tensors and other values.
        spec: Their structure.
        shape: What represents the structure in a key; a number where there is none.
        contents: What represents objects without tensors in a key, by their positions.
        inner: What these objects hold that is neither a plain value nor a container.
    """

    leaves: list[Any]
    spec: TreeSpec
    shape: Any
    contents: dict[int, Any] = {}  # noqa: RUF012 - never changed
    inner: Sequence[Any] = ()

    @property
    def visible(self) -> list[Any]:
        """Return what is not in the key by content."""
        if not self.contents:
            return self.leaves
        return [*(x for i, x in enumerate(self.leaves) if i not in self.contents), *self.inner]


class _Names(NamedTuple):
    """Names that distinguish the structures of opened objects."""

    number: int
    kind: type
    names: tuple[str, ...]


class _Opened:
    """An object of a call by its attributes; a node of pytree."""

    def __init__(self, names: _Names, values: list[Any]) -> None:
        self.names, self.values = names, values


class _Again:
    """The opened object that has this number; a node of pytree without children."""

    def __init__(self, number: int) -> None:
        self.number = number


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any], closed: Set[type]) -> Flat:
    """Return the leaves of a call, its structure, and what represents both in a key.

    ``closed``: types of objects that the function changes; these are leaves.
    """
    if not kwargs and PLAIN.issuperset(map(type, args)):  # 10 µs less than in general
        return Flat(list(args), _of_leaves(len(args)), len(args))
    leaves, spec = tree_flatten((args, kwargs))
    if not any(can_open(type(x)) for x in leaves):
        return Flat(leaves, spec, spec)
    opening = _Opening(closed)
    opened = list(map(opening.open, leaves))
    if any(one is not x for one, x in zip(opened, leaves, strict=True)):
        leaves, spec = tree_flatten(tree_unflatten(opened, spec))
    contents = {i: opening.content(x) for i, x in enumerate(leaves) if opening.counts_by_content(x)}
    return Flat(leaves, spec, spec, contents, opening.inner)


def unflatten(leaves: Iterable[Any], spec: TreeSpec) -> Any:
    """Return a call with other leaves; an object that was shared is one object again."""
    _rebuilding.made = {}
    try:
        return tree_unflatten(leaves, spec)
    finally:
        _rebuilding.made = {}


@cache
def _of_leaves(count: int) -> TreeSpec:
    return tree_flatten(((None,) * count, {}))[1]


class _Opening:
    """The way of one call's objects into its leaves and its key.

    Attributes:
        inner: What objects that count by content hold besides plain values and containers.
    """

    def __init__(self, closed: Set[type]) -> None:
        self._closed = closed
        self._opened: dict[int, int] = {}  # numbers, by id
        self._counted: dict[int, int] = {}
        self.inner: list[Any] = []

    def open(self, x: Any) -> Any:
        """Return a node of pytree for an object that holds tensors, else ``x``."""
        kind = type(x)
        if not can_open(kind) or kind in self._closed:
            return x
        if id(x) in self._opened:
            return _Again(self._opened[id(x)])
        held = look(x)
        if not held.tensors:
            return x
        if held.cycle:
            if counts_as_itself(kind):
                return x
            raise GraphError(
                f"an argument is a {kind.__qualname__} that holds itself, and a graph has no other "
                f"one like it; pass the tensors in it"
            )
        number = self._opened[id(x)] = len(self._opened)
        parts = attributes(x)
        values = [tree_map(self.open, each) for each in parts.values()]
        return _Opened(_Names(number, kind, tuple(parts)), values)

    def counts_by_content(self, x: Any) -> bool:
        """Return True for an object that is equal to others of its content."""
        kind = type(x)
        return can_open(kind) and kind not in self._closed and not counts_as_itself(kind)

    def content(self, x: Any) -> Any:
        """Return what represents an object, or what it holds, in a key."""
        kind = type(x)
        if kind in PLAIN:
            return value(x)
        if self.counts_by_content(x):
            if id(x) in self._counted:
                return _Again, self._counted[id(x)]
            self._counted[id(x)] = len(self._counted)
            held = attributes(x)
            return self._hashable(x, (kind, *held, *map(self.content, held.values())))
        if kind in _LISTS or isinstance(x, tuple):
            return kind, *map(self.content, x)
        if kind in _DICTS:
            return kind, *((value(key), self.content(one)) for key, one in x.items())
        self.inner.append(x)
        return value(x)

    def _hashable(self, x: Any, content: Any) -> Any:
        """Return the content of an object, or its own hash where only that exists."""
        if is_hashable(content) or not is_hashable(x):
            return content
        self.inner.append(x)
        return value(x)


def _values_of(opened: _Opened) -> tuple[list[Any], _Names]:
    return opened.values, opened.names


def _closed_again(values: Any, names: _Names) -> Any:
    """Return a new object of the class; no code of the program runs."""
    made: Any = object.__new__(names.kind) if names.kind not in NAMESPACES else names.kind()
    for name, one in zip(names.names, values, strict=True):
        object.__setattr__(made, name, one)
    _rebuilding.made[names.number] = made
    return made


register_pytree_node(_Opened, _values_of, _closed_again)
register_pytree_node(
    _Again, lambda x: ([], x.number), lambda _, number: _rebuilding.made.get(number)
)
