"""The arguments of a call as leaves and a structure: containers are opened, and dataclasses too.

A dataclass that holds tensors is opened by its attributes: tensors in it are tensors of the call,
and plain values are in its key. The runs after the first call get a separate object.

A dataclass without tensors is a leaf, and all runs get the caller's own object. In the key it
counts by content, or as itself where its class compares by identity.
"""

import threading
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, cached_property, lru_cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from commlib.errors import GraphError
from commlib.graph.calls.key_values import value
from commlib.graph.calls.output_guard import GuardedTensor
from commlib.graph.python.reach import attributes

# What is never unfolded.
_PLAIN = {torch.Tensor, torch.nn.Parameter, GuardedTensor, bool, int, float, str, type(None)}
_NAMESPACES = (SimpleNamespace, Namespace)
_CLOSED = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, Enum, type)
_ENDS = (*_CLOSED, FunctionType, ModuleType)  # what nothing is looked for in
_OF_PYTHON = 1 << 9  # the flag of classes that a class statement has made
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
    if not kwargs and _PLAIN.issuperset(map(type, args)):  # 10 µs less than in general
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


def held_in(*roots: Any) -> Iterator[Any]:
    """Yield the leaves of pytree in ``roots``, and in the objects among them; each object once."""
    left, seen = tree_leaves(roots), set[int]()
    while left:
        x = left.pop()
        yield x
        if can_open(type(x)) and id(x) not in seen:
            seen.add(id(x))
            left += tree_leaves([*attributes(x).values()])


def contents(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Return the objects of a call that can be opened, each with what it holds now."""
    found = {id(x): x for x in held_in(args, kwargs) if can_open(type(x))}
    return [(x, attributes(x)) for x in found.values()]


def changed(before: Sequence[tuple[Any, dict[str, Any]]]) -> Iterator[type]:
    """Yield the types of objects that hold something else than ``before``.

    A cached property that was computed since is not a change.
    """
    for x, held in before:
        kind, now = type(x), attributes(x)
        new = now.keys() - held.keys()
        computed = all(isinstance(getattr(kind, name, None), cached_property) for name in new)
        if not computed or any(now.get(name, kind) is not one for name, one in held.items()):
            yield kind


def exchanged(args: tuple[Any, ...], kwargs: dict[str, Any], closed: Set[type]) -> list[Any]:
    """Return the objects of a call of which later calls with its key may have others."""
    found = [x for x in held_in(args, kwargs) if can_open(type(x)) and type(x) not in closed]
    return [x for x in found if not is_hashable(x) or _look(x) == _TENSORS]


def first_of(among: Sequence[Any], *roots: Any) -> Any:
    """Return the first of some objects that ``roots`` hold, or None."""
    wanted, seen = set(map(id, among)), set[int]()
    left = list(roots) if wanted else []
    while left:
        x = left.pop()
        if id(x) in wanted:
            return x
        if type(x) in _PLAIN or isinstance(x, _ENDS) or id(x) in seen:
            continue
        seen.add(id(x))
        left += attributes(x).values()
        if isinstance(x, dict):
            left += x.values()
        elif isinstance(x, list | tuple | set | frozenset | deque):
            left += x
    return None


def is_hashable(x: Any) -> bool:
    """Return True if Python has a hash of an object."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _holds_all(kind: type) -> bool:
    """Return True if the attributes of an object are all that it is."""
    if kind in _NAMESPACES:
        return True
    if not (is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")) or issubclass(kind, _CLOSED):
        return False
    return all(each.__flags__ & _OF_PYTHON for each in kind.__mro__[:-1])


can_open: Callable[[type], bool] = lru_cache(maxsize=1000)(_holds_all)


def _counts_as_itself(kind: Any) -> bool:
    """Return True if objects of a class are equal to themselves alone."""
    return kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__


class _Found(NamedTuple):
    """Contents of an object: tensors, and the object itself."""

    tensors: bool
    cycle: bool


_TENSORS = _Found(tensors=True, cycle=False)


def _look(x: Any) -> _Found:
    """Return what an object that can be opened holds."""
    seen, path = set[int](), set[int]()
    left: list[tuple[Any, bool]] = [(x, False)]
    tensors = cycle = False
    while left:
        one, is_done = left.pop()
        if is_done:
            path.discard(id(one))
        elif isinstance(one, torch.Tensor):
            tensors = True
        elif can_open(type(one)):
            cycle = cycle or id(one) in path
            if id(one) in seen:
                continue
            seen.add(id(one))
            path.add(id(one))
            left.append((one, True))
            left += [(each, False) for each in tree_leaves([*attributes(one).values()])]
    return _Found(tensors, cycle)


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
        found = _look(x)
        if not found.tensors:
            return x
        if found.cycle:
            if _counts_as_itself(kind):
                return x
            raise GraphError(
                f"an argument is a {kind.__qualname__} that holds itself, and a graph has no other "
                f"one like it; pass the tensors in it"
            )
        number = self._opened[id(x)] = len(self._opened)
        held = attributes(x)
        values = [tree_map(self.open, each) for each in held.values()]
        return _Opened(_Names(number, kind, tuple(held)), values)

    def counts_by_content(self, x: Any) -> bool:
        """Return True for an object that is equal to others of its content."""
        kind = type(x)
        return can_open(kind) and kind not in self._closed and not _counts_as_itself(kind)

    def content(self, x: Any) -> Any:
        """Return what represents an object, or what it holds, in a key."""
        kind = type(x)
        if kind in _PLAIN:
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
    made: Any = object.__new__(names.kind) if names.kind not in _NAMESPACES else names.kind()
    for name, one in zip(names.names, values, strict=True):
        object.__setattr__(made, name, one)
    _rebuilding.made[names.number] = made
    return made


register_pytree_node(_Opened, _values_of, _closed_again)
register_pytree_node(
    _Again, lambda x: ([], x.number), lambda _, number: _rebuilding.made.get(number)
)
