"""Python objects that a function can reach: its closure, its own object, globals it names."""

import random
import weakref
from argparse import Namespace
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from enum import Enum
from functools import lru_cache, partial
from types import (
    CellType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from commlib.graph.python.global_names import FOREIGN, Name, has_state, names_in, root_of

_MOST = 100_000  # objects that are looked at; those near the function come first
# Of what is left out here, generators alone have a state that a program may set.
_LEAVES = (bool, int, float, complex, str, bytes, range, type(None), ModuleType)
RANDOM = (random.Random, np.random.Generator, np.random.RandomState)  # The program holds them.
_WITHOUT_ATTRIBUTES = (FunctionType, Name)  # ``held_by`` yields all that they lead to.
_LAZY = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)  # May be asked nothing.
_NAMESPACES = (SimpleNamespace, Namespace)  # Of the standard library, and what programs put there.
# Of torch, what is the program's wherever its class is, and other classes by their modules.
_KINDS_OF_TORCH = (torch.nn.Module, torch.optim.Optimizer)
_PARTS = ("_hooks", "_parameters", "_buffers", "_modules")  # how names end that torch follows
_OF_TORCH = (
    *("torch.nn", "torch.optim", "torch.ao", "torch.amp", "torch.cuda.amp", "torch.cpu.amp"),
    *("torch.distributions", "torch.distributed.optim"),
)

Followed: TypeAlias = Callable[[Any], Container[str] | None]  # names of an object's attributes


class Reached(NamedTuple):
    """Objects reached from other objects, nearest first, and the tensors that they hold."""

    objects: list[Any]
    tensors: list[torch.Tensor]


def reached(
    roots: Iterable[object], *, ends: tuple[type, ...] = (), followed: Followed | None = None
) -> Reached:
    """Return what ``roots`` lead to, once each.

    Plain values are left out; so are objects of libraries that keep their own state (the
    standard library's, commlib's, most of torch's), and what these lead to.

    Args:
        roots: Where the search begins.
        ends: Types of objects that lead to nothing.
        followed: Returns the attributes of an object or class that are followed; None for all.
    """
    kind_of: Callable[[Any], _Kind] = _kind
    queue, seen = deque[Any](roots), set[int]()
    objects, tensors = list[Any](), list[torch.Tensor]()  # an id names an object that is alive
    while queue and len(seen) < _MOST:
        obj = queue.popleft()
        kind = kind_of(type(obj))
        while kind is _WRAPS or kind is _REFERS:
            # A captured function represents its function; LR schedulers refer to their optimizer.
            obj = obj.__commlib_captures__ if kind is _WRAPS else obj()
            kind = kind_of(type(obj))
        if kind is _NOTHING or id(obj) in seen:
            continue
        if kind is _DEFINED and not is_of_the_program(obj):
            continue
        seen.add(id(obj))
        if kind is _TENSOR:
            tensors.append(obj)
            queue.extend(held_by_tensor(obj))
            continue
        objects.append(obj)
        if kind is _BUFFER:
            continue
        if kind is _DICT:
            if obj:
                queue.extend(obj.values())
        elif kind is _ITEMS:
            queue.extend(obj)
        elif not ends or not isinstance(obj, ends):
            queue.extend(_leads_to(obj, None if followed is None else followed(obj)))
    return Reached(objects, tensors)


class _Kind(Enum):
    """Treatment of the objects of a type."""

    NOTHING = 0
    TENSOR = 1
    WRAPS = 2
    REFERS = 3
    DEFINED = 4  # a function or class, which belongs to its own module
    DICT = 5
    ITEMS = 6
    FOLLOWED = 7
    BUFFER = 8


# Asked at every object: Python looks up a global name faster than a member of an enumeration.
_NOTHING, _TENSOR, _DEFINED = _Kind.NOTHING, _Kind.TENSOR, _Kind.DEFINED
_WRAPS, _REFERS, _DICT, _ITEMS = _Kind.WRAPS, _Kind.REFERS, _Kind.DICT, _Kind.ITEMS
_BUFFER = _Kind.BUFFER


@lru_cache(maxsize=10_000)
def _kind(kind: type) -> _Kind:
    if issubclass(kind, torch.Tensor):
        return _Kind.NOTHING if issubclass(kind, _LAZY) else _Kind.TENSOR
    if is_captured(kind):
        return _Kind.WRAPS
    if issubclass(kind, weakref.ref):
        return _Kind.REFERS
    if issubclass(kind, _LEAVES):
        return _Kind.NOTHING
    if issubclass(kind, FunctionType | type):
        return _Kind.DEFINED
    if kind in (dict, OrderedDict):
        return _Kind.DICT
    if kind in (list, tuple, set):
        return _Kind.ITEMS
    if issubclass(kind, (np.ndarray, bytearray, array)):
        return _Kind.BUFFER
    is_followed = issubclass(kind, (MethodType, partial, Name, CellType, torch.Generator, *RANDOM))
    return _Kind.FOLLOWED if is_followed or is_of_the_program(kind) else _Kind.NOTHING


def is_captured(kind: type) -> bool:
    """Return True for classes of captured functions; no code of a metaclass runs."""
    return any("__commlib_captures__" in vars(each) for each in kind.__mro__)


def is_of_the_program(kind: Any) -> bool:
    """Return True for a class or function outside the libraries that keep their own state."""
    if kind in _NAMESPACES or (isinstance(kind, type) and issubclass(kind, _KINDS_OF_TORCH)):
        return True
    module = str(kind.__module__)
    if module in ("builtins", "collections", "__main__"):
        return True
    root = root_of(module)
    return module.startswith(_OF_TORCH) if root == "torch" else root not in FOREIGN


def held_by_tensor(x: torch.Tensor) -> Iterator[Any]:
    """Yield what autograd calls for a tensor, and the attributes that a program has given to it."""
    yield from (x._backward_hooks or {}).values()
    yield from (getattr(x, "_post_accumulate_grad_hooks", None) or {}).values()
    if x.__dict__:
        yield from given_to(x).values()


def given_to(x: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a program has given to a tensor, as they are kept."""
    kind: Any = type(x)
    return {} if kind.__module__.startswith("commlib.") else x.__dict__


def _leads_to(x: Any, names: Container[str] | None) -> Iterable[Any]:
    """Return what an object holds, in its attributes ``names`` or in all of them."""
    kind: Any = type(x)
    refs = [forward_of(kind)] if isinstance(x, torch.nn.Module) else [*held_by(x)]
    if isinstance(x, type):
        held = {**_functions_of(x), **class_values(x)}.items()
        refs += [
            one for name, one in held if names is None or name in names or name.startswith("__")
        ]
        refs += _own_classes(x)
    elif not isinstance(x, _WITHOUT_ATTRIBUTES):
        held, is_torch = attributes(x).items(), isinstance(x, _KINDS_OF_TORCH)
        refs += [
            one
            for name, one in held
            if names is None or name in names or (is_torch and name.endswith(_PARTS))
        ]
        if isinstance(x, torch.jit.ScriptModule):  # its parts are in dicts of TorchScript
            refs += [*x.children(), *x.parameters(recurse=False), *x.buffers(recurse=False)]
        refs += _own_classes(kind)
    return refs


@lru_cache(maxsize=10_000)
def forward_of(kind: Any) -> Any:
    """Return the forward of a class of modules; None for a scripted one, which has no code."""
    forward = next(vars(each)["forward"] for each in kind.__mro__ if "forward" in vars(each))
    return None if issubclass(kind, torch.jit.ScriptModule) else forward


@lru_cache(maxsize=10_000)
def _own_classes(kind: type) -> list[type]:
    """Return a class and its bases but for those of installed packages, which keep no state."""
    return [each for each in kind.__mro__ if has_state(each)]


def _functions_of(kind: type) -> dict[str, Any]:
    """Return the functions of a class of the program, and descriptors, which may keep values."""
    if not has_state(kind):
        return {}
    inner = ((k, getattr(x, "__func__", getattr(x, "fget", x))) for k, x in vars(kind).items())
    return {name: x for name, x in inner if type(x) is FunctionType or _keeps(type(x))}


def _keeps(kind: type) -> bool:
    return hasattr(kind, "__get__") and has_state(kind)


def class_values(kind: type) -> dict[str, Any]:
    """Return the attributes of a class of the program that are neither functions nor Python's."""
    if not has_state(kind) or issubclass(kind, Enum):
        return {}
    return {
        name: x
        for name, x in vars(kind).items()
        if not (name.startswith(("__", "_abc_")) or hasattr(type(x), "__get__"))
    }


def held_by(x: Any) -> Iterator[Any]:
    """Yield what an object holds elsewhere than in its attributes."""
    if isinstance(x, FunctionType):
        yield from x.__closure__ or ()
        yield from x.__defaults__ or ()
        yield from (x.__kwdefaults__ or {}).values()
        yield from names_in(x)
        yield from vars(x).values()
    elif isinstance(x, Name):
        yield x.names.get(x.name)
    elif isinstance(x, CellType):
        yield content(x)
    elif isinstance(x, MethodType):
        yield from (x.__self__, x.__func__)
    elif isinstance(x, partial):
        yield from (x.func, x.args, x.keywords)
    elif isinstance(x, dict):
        yield from x.values()
    elif isinstance(x, list | tuple | set | frozenset | deque):
        yield from x
    elif isinstance(x, MappingProxyType):
        yield from x.values()
    if callable(x) and not isinstance(x, type | FunctionType | Name):
        yield getattr(type(x).__call__, "__func__", type(x).__call__)


def content(cell: CellType) -> Any:
    """Return what a variable of a closure holds, or None where it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def attributes(x: Any) -> dict[str, Any]:
    """Return the attributes of an object that are in its ``__dict__`` or its slots.

    No code of the program runs, unless only that code knows the ``__dict__``, as that of a proxy.
    """
    return {**dict_of(x), **in_slots(x)}


def in_slots(x: Any) -> dict[str, Any]:
    """Return the attributes of an object that are in its slots, without those that are unset."""
    values: dict[str, Any] = {}
    kind: Any = type(x)
    for name in slots(kind):
        try:
            values[name] = object.__getattribute__(x, name)
        except AttributeError:
            continue
    return values


def dict_of(x: Any) -> Any:
    """Return the ``__dict__`` of an object, an empty one where it has none."""
    try:
        return object.__getattribute__(x, "__dict__")
    except AttributeError:  # that of a proxy, or none
        pass
    try:
        return getattr(x, "__dict__", None) or {}
    except Exception:  # a __getattr__ of the program that knows no such name
        return {}


@lru_cache(maxsize=10_000)
def slots(kind: type) -> tuple[str, ...]:
    """Return the names that objects of a class keep outside a ``__dict__``."""
    names: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
