"""Attributes that a function may read: the names in all code that may run during its run.

An attribute that no such code names is not a setting of the function, such as a counter of the loop
around it. Where code reads attributes by computed names, or can't be seen, all of them count.

Three lists are written by hand, as Python does not tell what they say. ``_HARMLESS`` has modules
whose hidden code reads no attributes but by methods such as ``__eq__``. ``_OUTSIDE`` has methods
that no run of a function needs. ``_BY_NAME`` of ``code_names`` has functions that read attributes
by names which are values. What is missing in the first two makes more attributes count.
"""

import sys
import weakref
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from enum import Enum
from functools import lru_cache, partial
from pickle import PickleError
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree

from commlib.graph.python.code_names import names_of
from commlib.graph.python.global_names import imported_by, modules_through, root_of
from commlib.graph.python.reach import (
    attributes,
    content,
    held_by,
    held_by_tensor,
    is_captured,
    is_of_the_program,
)

_MOST = 50_000  # Objects and functions that are looked at.
_ENDS = {"torch", "torchgen", "numpy", "cupy", "commlib"}  # Their code reads what bases define.
# Of the standard library, code that reads no attributes but by methods such as __eq__.
_HARMLESS = {
    *("builtins", "math", "time", "functools", "itertools", "contextlib", "collections", "re"),
    *("typing", "enum", "abc", "warnings", "logging", "random", "os", "posixpath", "genericpath"),
    *("operator", "_operator", "_functools", "numbers", "threading", "_thread", "types", "sys"),
    *("_collections_abc", "_io", "_random", "_abc", "string", "weakref", "_weakref", "_weakrefset"),
    *("_collections", "pathlib", "platform", "__future__", "typing_extensions"),
}
_LEAVES = (bool, int, float, complex, str, bytes, range, type(None), torch.Tensor, Enum)
_HOLDING = {"builtins", "functools", "collections", "types", "argparse"}
_SHOWN = _HOLDING - {"functools"}  # What callables of these hold is followed.
_HIDING = {"builtins", "itertools"}  # Their iterators have code that can't be seen.
ASKING = frozenset(("getattr", "hasattr"))  # These names count as read where code has them.
_MAKES = {"__init__", "__new__"}  # ``type`` calls these where objects are made.
# These run where objects are copied or dropped: what these read is of no other use.
_OUTSIDE = {
    "__del__",
    "__getstate__",
    "__setstate__",
    "__reduce__",
    "__reduce_ex__",
    "__dir__",
    "__init_subclass__",
    "__class_getitem__",
    "__set_name__",
}


class _UnknownError(Exception):
    """Code that may read any attribute."""


def read_names(roots: Iterable[Any]) -> frozenset[str] | None:
    """Return the names of attributes that code may read where ``roots`` are called and used.

    None represents any name.
    """
    reader = _Reader(roots)
    try:
        reader.run()
    except _UnknownError:
        return None
    return frozenset(reader.names)


def is_read(x: Any, name: str, names: frozenset[str] | None) -> bool:
    """Return True if an attribute may be among those that code reads."""
    return names is None or name in names or names_read(x, names) is None


def names_read(x: Any, names: frozenset[str] | None) -> frozenset[str] | None:
    """Return which of the attributes of ``x`` code may read; None for any.

    ``names``: those that it reads of any object.
    """
    kind: Any = type(x)
    return None if names is None or _reads_all(kind) else names


@lru_cache(maxsize=10_000)
def _reads_all(kind: Any) -> bool:
    """Return True for classes of torch, and those with an access that is not that of Python."""
    return root_of(kind.__module__) in _ENDS or kind.__getattribute__ not in _PLAIN_ACCESS


_PLAIN_ACCESS = (object.__getattribute__, type.__getattribute__)


class _Reader:
    """A walk over objects, and the code that may run."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.names: set[str] = set()
        self._left = deque(roots)
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # an id is that of an object that is alive
        self._tensors: dict[int, torch.Tensor] = {}
        self._known: set[type] = set()
        self._unnamed: dict[str, list[Any]] = {}  # methods that no code has named yet

    def run(self) -> None:
        """Look at everything. Raises ``_UnknownError``."""
        while self._left:
            x = self._left.popleft()
            if isinstance(x, torch.Tensor) and id(x) not in self._tensors:
                self._tensors[id(x)] = x  # two may hold each other
                self._left.extend(held_by_tensor(x))
            if isinstance(x, _LEAVES) or id(x) in self._seen:
                continue
            self._seen.add(id(x))
            self._kept.append(x)
            if len(self._seen) > _MOST:
                raise _UnknownError
            if isinstance(x, FunctionType):
                self._add_function(x)
            elif isinstance(x, type):
                self._add_class(x)
                self._make(x)
            elif is_captured(type(x)):
                self._left.append(x.__commlib_captures__)
            elif isinstance(x, BuiltinFunctionType):
                _check_visible(x)
                self._left.append(x.__self__)
            elif isinstance(x, ModuleType):
                if root_of(x.__name__) not in _ENDS | _HARMLESS:
                    raise _UnknownError  # its functions may be called by names that others read
            else:
                self._add_object(x)

    def _add_object(self, x: Any) -> None:
        kind: Any = type(x)
        root = root_of(kind.__module__)
        if isinstance(x, Iterator | Coroutine) and root in _HIDING:
            raise _UnknownError
        shown = root not in sys.stdlib_module_names or kind is partial or root in _SHOWN
        if callable(x) and not shown and not isinstance(x, weakref.ref):
            self._add_hidden(x)
        self._add_class(kind)
        if isinstance(x, weakref.ref):
            self._left.append(x())
        elif root in _HOLDING or _is_followed(kind, root):
            self._left.extend(held_by(x))
            self._left.extend(attributes(x).values())
            self._left.append(x.fget if isinstance(x, property) else None)
        for name in (
            "__commlib_captures__",
            "_init_fn",
        ):  # of a captured function, a custom operator
            if name in dir(kind) or (root in _ENDS and name in attributes(x)):
                self._left.append(getattr(x, name))
        node = _pytree.SUPPORTED_NODES.get(kind)
        if node is not None:
            self._left.append(node.flatten_fn)

    def _add_hidden(self, x: Any) -> None:
        """Add what a callable of the standard library is made of: texts in it may be names.

        Its code can't be seen (``attrgetter``), but its pickled form shows its arguments.
        """
        try:
            made = x.__reduce_ex__(2)
        except (TypeError, ValueError, AttributeError, PickleError):  # it has no such form
            raise _UnknownError from None
        left = [made]
        while left:
            held = left.pop()
            if isinstance(held, str):
                self._name(held.split("."))
            elif isinstance(held, tuple | list | dict):
                left += [*held, *held.values()] if isinstance(held, dict) else held
            elif isinstance(held, partial):
                left += (held.args, held.keywords)
            else:
                self._left.append(held)

    def _add_function(self, x: FunctionType) -> None:
        self._left.extend(content(cell) for cell in x.__closure__ or ())
        self._left.extend((*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()))
        self._left.extend(vars(x).values())
        code_names = names_of(x.__code__)
        if root_of(x.__globals__.get("__name__")) in _ENDS:
            self._name(code_names.read)
            return
        _check_visible(x)
        ignored = {"__getattribute__"} if x.__name__ == "__getattribute__" else set()
        if code_names.by_name - ignored:
            raise _UnknownError
        self._name(code_names.read | (ASKING & code_names.looked_up))
        if "__class__" in code_names.read or "type" in code_names.looked_up:
            self._name(_MAKES)
        for name in code_names.looked_up & x.__globals__.keys():
            self._add_global(x.__globals__[name], code_names.read)
        for module in imported_by(x) if code_names.imported else ():
            if module is None:
                raise _UnknownError
            self._add_global(module, code_names.read)

    def _add_global(self, x: Any, read: Iterable[str]) -> None:
        """Add what a name refers to: of a module, what code reads from it."""
        if not isinstance(x, ModuleType):
            self._left.append(x)
        for module in modules_through([x], read, _ENDS | _HARMLESS):
            names = vars(module)
            lazy = "__getattr__" in names or type(module) is not ModuleType
            if lazy and any(name not in names and name.isidentifier() for name in read):
                raise _UnknownError
            held = (names[name] for name in read if name in names)
            self._left.extend(one for one in held if not isinstance(one, ModuleType))

    # -- classes -----------------------------------------------------------------------------------

    def _add_class(self, kind: type) -> None:
        """Add the methods of a class that code names, and those that Python calls."""
        for each in kind.__mro__:
            if each in self._known or each is object:
                continue
            self._known.add(each)
            root = root_of(each.__module__)
            by_name = issubclass(each, torch.nn.Module | torch.optim.Optimizer)
            if (root in _ENDS or root in sys.stdlib_module_names) and not by_name:
                self._name(_names_of_class(each))
                continue
            self._name(vars(each).get("__match_args__", ()))
            for name, x in vars(each).items():
                self._add_method(name, x)
            if type(each) is not type:
                self._add_class(type(each))

    def _add_method(self, name: str, x: Any) -> None:
        x = getattr(x, "__func__", x)  # of a static method
        of_python = name.startswith("__") and name.endswith("__") and name not in _MAKES
        if of_python and (name in _OUTSIDE or not hasattr(type(x), "__get__")):
            return
        if of_python or name in self.names:
            self._left.append(x)
        else:
            self._unnamed.setdefault(name, []).append(x)

    def _make(self, kind: type) -> None:
        """Add what makes an object of a class."""
        for each in kind.__mro__:
            if root_of(each.__module__) not in _ENDS | sys.stdlib_module_names:
                self._left.extend(vars(each)[name] for name in _MAKES & vars(each).keys())

    def _name(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.names:
                self.names.add(name)
                self._left.extend(self._unnamed.pop(name, ()))


@lru_cache(maxsize=2000)
def _names_of_class(kind: type) -> frozenset[str]:
    """Return the names that the code of a library's class reads, and those that it defines."""
    names = set(vars(kind))
    for x in vars(kind).values():
        inner = getattr(x, "__func__", getattr(x, "fget", x))
        if isinstance(inner, FunctionType):
            names |= names_of(inner.__code__).read
    return frozenset(names)


def _is_followed(kind: type, root: str) -> bool:
    if root in _ENDS:
        return is_of_the_program(kind)
    return root not in sys.stdlib_module_names


def _check_visible(x: Any) -> None:
    """Raise for a function of a library whose code can't be seen, or may be anything."""
    of = type(x.__self__) if isinstance(x, BuiltinFunctionType) else x
    root = root_of(x.__module__ or of.__module__)
    if root in _ENDS or root in _HARMLESS:
        return
    if isinstance(x, BuiltinFunctionType) or root in sys.stdlib_module_names:
        raise _UnknownError
