"""Objects of a call that can be opened, with what they hold.

These are dataclasses, classes of attrs, namespaces and subclasses of ``UserDict``: their attributes
are all that they are.
"""

from argparse import Namespace
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import is_dataclass
from enum import Enum
from functools import cached_property, lru_cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from commlib.graph.calls.output_guard import GuardedTensor
from commlib.graph.python.reach import attributes

# What is never unfolded.
PLAIN = {torch.Tensor, torch.nn.Parameter, GuardedTensor, bool, int, float, str, type(None)}
NAMESPACES = (SimpleNamespace, Namespace)
_CLOSED = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, Enum, type)
_ENDS = (*_CLOSED, FunctionType, ModuleType)  # what nothing is looked for in
_OF_PYTHON = 1 << 9  # the flag of classes that a class statement has made

Contents = Sequence[tuple[Any, dict[str, Any]]]  # objects, and what each of them holds


def held_in(*roots: Any) -> Iterator[Any]:
    """Yield the leaves of pytree in ``roots``, and in the objects among them; each object once."""
    left, seen = tree_leaves(roots), set[int]()
    while left:
        x = left.pop()
        yield x
        if can_open(type(x)) and id(x) not in seen:
            seen.add(id(x))
            left += tree_leaves([*attributes(x).values()])


def contents(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Contents:
    """Return the objects of a call that can be opened, each with what it holds now."""
    objects = {id(x): x for x in held_in(args, kwargs) if can_open(type(x))}
    return [(x, attributes(x)) for x in objects.values()]


def changed(before: Contents) -> Iterator[type]:
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
    opened = [x for x in held_in(args, kwargs) if can_open(type(x)) and type(x) not in closed]
    return [x for x in opened if not is_hashable(x) or look(x) == _TENSORS]


def first_of(among: Sequence[Any], *roots: Any) -> Any:
    """Return the first of some objects that ``roots`` hold, or None."""
    wanted, seen = set(map(id, among)), set[int]()
    left = list(roots) if wanted else []
    while left:
        x = left.pop()
        if id(x) in wanted:
            return x
        if type(x) in PLAIN or isinstance(x, _ENDS) or id(x) in seen:
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
    if kind in NAMESPACES:
        return True
    is_known = is_dataclass(kind) or hasattr(kind, "__attrs_attrs__") or issubclass(kind, UserDict)
    if not is_known or issubclass(kind, _CLOSED):
        return False
    return all(each.__flags__ & _OF_PYTHON for each in kind.__mro__[:-1])


can_open: Callable[[type], bool] = lru_cache(maxsize=1000)(_holds_all)


def counts_as_itself(kind: Any) -> bool:
    """Return True if objects of a class are equal to themselves alone."""
    return kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__


class Content(NamedTuple):
    """Kinds of contents of an object: tensors, and the object itself."""

    tensors: bool
    cycle: bool


_TENSORS = Content(tensors=True, cycle=False)


def look(x: Any) -> Content:
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
    return Content(tensors, cycle)
