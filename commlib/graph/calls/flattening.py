"""The arguments of a call as leaves and a structure: containers are opened, and dataclasses too.

A dataclass is opened by its attributes, whether it is hashable or not: tensors in it are tensors of
the call, and plain values are in its key. The runs after the first call get a separate object.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence, Set
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

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
from commlib.graph.calls.output_guard import GuardedTensor
from commlib.graph.python.reach import attributes

Flat: TypeAlias = tuple[list[Any], TreeSpec, Any]  # leaves, structure, what represents it in a key

# What is never unfolded.
_PLAIN = {torch.Tensor, torch.nn.Parameter, GuardedTensor, bool, int, float, str, type(None)}
_NAMESPACES = (SimpleNamespace, Namespace)
_CLOSED = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, Enum, type)
_known: dict[type, bool] = {}  # whether objects of a type are opened
_OF_PYTHON = 1 << 9  # the flag of classes that a class statement has made


class _Names(NamedTuple):
    """Names that distinguish the structures of opened objects."""

    kind: type
    names: tuple[str, ...]


class _Opened:
    """An object of a call by its attributes; a node of pytree."""

    def __init__(self, names: _Names, values: list[Any]) -> None:
        self.names, self.values = names, values


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any], closed: Set[type]) -> Flat:
    """Return the leaves of a call, its structure, and what represents that in a key.

    The latter is a number for arguments without any structure.

    ``closed``: types of objects that the function changes; these are leaves.
    """
    if not kwargs and _PLAIN.issuperset(map(type, args)):  # 10 µs less than in general
        return list(args), _of_leaves(len(args)), len(args)
    leaves, spec = tree_flatten((args, kwargs))
    if any(_can_open(type(x)) for x in leaves):
        opened = [_open(x, closed, ()) for x in leaves]
        leaves, spec = tree_flatten(tree_unflatten(opened, spec))
    return leaves, spec, spec


@cache
def _of_leaves(count: int) -> TreeSpec:
    return tree_flatten(((None,) * count, {}))[1]


def contents(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Return the objects of a call that are opened, each with what it holds now."""
    found: list[tuple[Any, dict[str, Any]]] = []
    left = tree_leaves((args, kwargs))
    while left:
        x = left.pop()
        if _can_open(type(x)):
            found.append((x, attributes(x)))
            left += tree_leaves(found[-1][1])
    return found


def changed(before: Sequence[tuple[Any, dict[str, Any]]]) -> Iterator[type]:
    """Yield the types of objects that hold something else than ``before``."""
    for x, held in before:
        now = attributes(x)
        if now.keys() != held.keys() or any(now[name] is not held[name] for name in now):
            yield type(x)


def _can_open(kind: Any) -> bool:
    """Return True if the attributes of an object are all that it is."""
    found = _known.get(kind)
    if found is None:
        found = _known[kind] = _holds_all(kind)
    return found


def _holds_all(kind: type) -> bool:
    if kind in _NAMESPACES:
        return True
    if not (is_dataclass(kind) or hasattr(kind, "__attrs_attrs__")) or issubclass(kind, _CLOSED):
        return False
    return all(each.__flags__ & _OF_PYTHON for each in kind.__mro__[:-1])


def _open(x: Any, closed: Set[type], inside: tuple[int, ...]) -> Any:
    kind = type(x)
    if not _can_open(kind) or kind in closed:
        return x
    if id(x) in inside:
        raise GraphError(
            f"an argument is a {kind.__qualname__} that holds itself, and a graph has no other one "
            f"like it; pass the tensors in it"
        )
    held, inside = attributes(x), (*inside, id(x))
    values = [tree_map(lambda one: _open(one, closed, inside), each) for each in held.values()]
    return _Opened(_Names(kind, tuple(held)), values)


def _values_of(opened: _Opened) -> tuple[list[Any], _Names]:
    return opened.values, opened.names


def _closed_again(values: Any, names: _Names) -> Any:
    """Return a new object of the class; no code of the program runs."""
    made: Any = object.__new__(names.kind) if names.kind not in _NAMESPACES else names.kind()
    for name, value in zip(names.names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


register_pytree_node(_Opened, _values_of, _closed_again)
