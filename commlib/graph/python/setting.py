"""Settings in a form that tells one from another: the value of plain ones, else which object."""

from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import torch

from commlib.graph.python.reach import attributes, given_to, is_of_the_program
from commlib.graph.python.read_names import is_read
from commlib.graph.python.user_names import kind_name

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
FIXED = (FunctionType, type, ModuleType)  # what a program does not exchange between calls
OWN_WAYS = (torch.nn.Module, torch.optim.Optimizer)  # to know of their changes
_FEW = 32  # items of a list or dict that are followed
_known_open: dict[type, bool] = {}


class Same(int):
    """Identity of an object: equal for the same object.

    A number, so that no Python code runs where a key with many of them is looked up.
    """

    _object: object

    def __new__(cls, x: object) -> "Same":
        """Return the number of ``x``, and hold it: its number belongs to no other object then."""
        self = super().__new__(cls, id(x))
        self._object = x
        return self

    def __repr__(self) -> str:
        return f"{kind_name(self._object)} at {id(self._object):#x}"


def is_open(kind: type) -> bool:
    """Return True if the attributes of an object of this type tell what it is."""
    cached = _known_open.get(kind)
    if cached is None:
        closed = issubclass(kind, (*OWN_WAYS, *PLAIN, *FIXED, torch.Tensor, Enum))
        cached = _known_open[kind] = not closed and is_of_the_program(kind)
    return cached


def has_settings(x: Any) -> bool:
    """Return True for an argument whose attributes may tell it from another."""
    is_tensor = isinstance(x, torch.Tensor)
    return bool(x.__dict__ and given_to(x)) if is_tensor else is_open(type(x))


def _looks_frozen(kind: Any) -> bool:
    """Return True for a dataclass whose objects Python keeps from changing."""
    held = (vars(each).get("__dataclass_params__") for each in kind.__mro__)
    params = next(filter(None, held), None)
    return params is not None and params.frozen and is_open(kind)


is_frozen: Callable[[type], bool] = lru_cache(maxsize=10_000)(_looks_frozen)


def _fields(x: Any) -> list[Any]:
    return [getattr(x, name, None) for name in type(x).__dataclass_fields__]


def _is_value(x: Any) -> bool:
    """Return True for plain values, and for what holds nothing else and never changes."""
    if isinstance(x, tuple):
        return all(map(_is_value, x))
    return isinstance(x, PLAIN) or (is_frozen(type(x)) and all(map(_is_value, _fields(x))))


def setting(x: Any, depth: int = 0, names: frozenset[str] | None = None) -> Any:
    """Return what tells a setting from another.

    Tuples and frozen dataclasses of plain values count by these. Lists, dicts, sets and objects
    count by what they hold down to ``depth``, below that as themselves. Of objects, attributes in
    ``names`` count, or all of them.
    """
    for number in (float, complex):
        if issubclass(type(x), number):  # -0.0 is not 0.0; a subclass may have its own text
            return type(x), number.__repr__(x)
    if isinstance(x, PLAIN):
        return type(x), x
    if isinstance(x, tuple) or (depth and isinstance(x, list) and len(x) <= _FEW):
        return type(x), tuple(setting(one, depth - 1 if depth else 0, names) for one in x)
    if depth and type(x) is dict and len(x) <= _FEW:
        return tuple((setting(key), setting(held, depth - 1, names)) for key, held in x.items())
    if depth and type(x) is set and len(x) <= _FEW:
        return set, frozenset(map(setting, x))
    if is_frozen(type(x)) and _is_value(x):
        return type(x), tuple(setting(one) for one in _fields(x))
    if depth and is_open(type(x)):
        held = attributes(x).items()
        read = {name: one for name, one in held if is_read(x, name, names)}
        return Same(x), setting(read, depth - 1, names)
    return Same(x)


def label(key: Any) -> str:
    """Return a text for a key; no code of the program runs, and no tensor is read."""
    return repr(key) if type(key) in PLAIN else f"{kind_name(key)} at {id(key):#x}"
