"""Values that a function uses in addition to its arguments, as a part of the cache key."""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from itertools import chain
from operator import is_
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from commlib.graph.module_watch import ModuleWatch, Same
from commlib.graph.operators.schema import memory
from commlib.graph.python.global_names import Name
from commlib.graph.python.plain_contents import PlainContents
from commlib.graph.python.reach import (
    attributes,
    class_values,
    content,
    forward_of,
    is_of_the_program,
    reached,
)
from commlib.graph.python.read_names import is_read, read_names

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MOST = 200  # attributes of plain objects that are asked at every call
_DEEP = 4  # how far lists and objects are followed
_FEW = 32  # items of a list or dict that are asked at every call
_FIXED = (FunctionType, type, ModuleType)  # what a program does not exchange between calls
_NESTED = (list, dict, set, tuple)
_DEFAULTS = ("__defaults__", "__kwdefaults__")  # of the function itself
_OWN_WAYS = (torch.nn.Module, torch.optim.Optimizer)  # to know of their changes
_CONTAINERS = ("builtins", "collections")
_Fact = tuple[tuple[int, str], Any]  # whose it is, its name, and what it is


class _Reading(NamedTuple):
    """A look at variables and attributes."""

    held: list[Any]
    whole: bytes  # the contents of lists and dicts among them
    facts: tuple[Any, ...]  # what represents all of this in a key


class Surroundings:
    """Settings that a function reads from where it can reach: they tell its calls apart.

    These are settings of optimizers' parameter groups, the attributes and parts of modules,
    variables of the function's closure and module, and plain attributes of objects there. What the
    function changes itself is its state and no setting.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn, self._inner = fn, getattr(fn, "__func__", fn)
        self._modules = ModuleWatch()
        self._contents = PlainContents()
        self._names: frozenset[str] | None = frozenset()  # that the function may read; None for any
        self._numbers: dict[Any, int] = {}  # by what modules hold: a short key for much
        self._number = 0
        self._optimizers: list[torch.optim.Optimizer] = []
        self._cells: list[tuple[str, CellType]] = []
        self._globals: list[tuple[str, Name]] = []
        self._objects: list[tuple[Any, str]] = []
        self._own: set[Any] = set()  # what calls of the function change
        self._readers: list[Callable[[], Any]] = []  # of variables and attributes
        self._last = _Reading([], b"", ())
        self._is_steady = False  # whether the same objects tell the same
        self._holds_items = False  # whether a variable is a small list or dict
        self.weights: list[torch.Tensor] = []

    def find(self, leaves: Sequence[Any] = ()) -> None:
        """Look for settings; those that are new count from now on.

        ``leaves``: the arguments of a call.
        """
        self._cells, self._globals, self._objects, self._is_steady = [], [], [], False
        self._note_names(leaves)
        names = dict(_variables(self._fn))
        whole = reached([self._fn]).objects
        modules = [x for x in whole if isinstance(x, torch.nn.Module)]
        kinds: set[Any] = {type(module) for module in modules}
        forwards = map(forward_of, kinds)
        for x in reached([self._fn, *forwards], ends=_OWN_WAYS).objects:
            if isinstance(x, CellType):
                if id(x) in names:
                    self._cells.append((names[id(x)], x))
            elif isinstance(x, Name):
                if not isinstance(x.names.get(x.name), _FIXED):
                    self._globals.append((x.name, x))
            elif not isinstance(x, _OWN_WAYS):
                self._objects += [(x, name) for name in self._attributes_of(x)]
        self._objects.sort(key=lambda each: each[1] == "__class__")  # attributes come first
        del self._objects[_MOST:]
        self._objects += [
            (self._inner, name) for name in _DEFAULTS if getattr(self._inner, name, None)
        ]
        self._readers = [partial(content, cell) for _, cell in self._cells]
        self._readers += [partial(each.names.get, each.name) for _, each in self._globals]
        self._readers += [partial(getattr, x, name, None) for x, name in self._objects]
        self._optimizers = [x for x in whole if isinstance(x, torch.optim.Optimizer)]
        self._modules.add(modules)
        self._contents.watch(self._containers(), self._own)
        found: list[Any] = [*self._modules.tensors()]
        found += [x for each in self._optimizers for g in each.param_groups for x in g["params"]]
        found += [x for _, _, x in self._variables()]
        weights = (x for x in found if isinstance(x, torch.Tensor) and x.is_leaf)
        self.weights = [*{id(x): x for x in weights}.values()]

    def _note_names(self, leaves: Sequence[Any]) -> None:
        """Look for the names of attributes that the function may read; known ones stay."""
        found = read_names([self._fn, *leaves])
        self._names = None if found is None or self._names is None else self._names | found
        self._modules.read_only(self._names)

    def _attributes_of(self, x: Any) -> list[str]:
        """Return the attributes of an object that the function may read; of a class, its values."""
        if isinstance(x, type):
            return [name for name in class_values(x) if is_read(x, name, self._names)]
        if type(x).__module__ in _CONTAINERS:
            return []
        own = ["__class__"] if _is_open(type(x)) else []
        return own + [name for name in attributes(x) if is_read(x, name, self._names)]

    def _containers(self) -> Iterator[tuple[int, str, Any]]:
        """Yield what may hold plain values, but for variables whose items are facts."""
        for x, name in self._objects:
            yield id(x), name, getattr(x, name, None)
        for where, name, x in self._variables():
            if not _is_small(x) or any(isinstance(held, _NESTED) for _, held in _items(x)):
                yield where, name, x
        for module in self.modules:
            for name, x in vars(module).items():
                if not name.startswith("_") and is_read(module, name, self._names):
                    yield id(module), name, x

    def _of_object(self, x: Any) -> Iterator[_Fact]:
        for name, held in attributes(x).items():
            if is_read(x, name, self._names):
                yield (id(x), name), _setting(held, _DEEP, self._names)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Return the modules that the function can reach."""
        return self._modules.modules

    def key(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the settings as they are now, of objects among the arguments too."""
        if self._modules.modules and self._modules.changed:
            found = tuple(self._modules.facts().items())
            self._number = self._numbers.setdefault(found, len(self._numbers))
            self._modules.known = found
        own, number = self._own, self._number
        now = [read() for read in self._readers]
        last, whole = self._last, self._contents.whole
        steady = self._is_steady and all(map(is_, now, last.held))
        if not steady or whole != last.whole:
            facts = tuple(what for name, what in self._facts() if name not in own)
            self._holds_items = any(_is_small(x) for _, _, x in self._variables())
            last = self._last = _Reading(now, whole, facts)  # at once: threads share it
            self._is_steady = not (self._optimizers or self._holds_items)
        objects = [x for x in leaves if _is_open(type(x))] if leaves else ()
        if not objects:
            return (number, last.facts)
        asked = chain(*map(self._of_object, objects))
        return (number, last.facts, *(what for name, what in asked if name not in own))

    def _facts(self) -> Iterator[_Fact]:
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for name, found in group.items():
                    what = len(found) if name == "params" else _setting(found, _DEEP)
                    yield (id(optimizer), f"{name} of group {number}"), what
        for where, name, x in self._variables():
            yield from _variable(where, name, x)
        for x, name in self._objects:
            yield (id(x), name), _setting(getattr(x, name, None))
        if self._contents.held:
            yield from self._contents.facts()

    def _variables(self) -> Iterator[tuple[int, str, Any]]:
        for name, cell in self._cells:
            yield id(cell), name, content(cell)
        for name, each in self._globals:
            yield id(each.names), name, each.names.get(name)

    def places(self) -> dict[Any, Any]:
        """Return the addresses of tensors that small lists and dicts hold.

        One that is replaced by another may still be held elsewhere. Where the function itself
        replaces it, its place tells nothing.
        """
        if not self._holds_items:
            return {}
        found = (fact for variable in self._variables() for fact in _places(*variable))
        return {name: place for name, place in found if name not in self._own}

    def moved(self, places: dict[Any, Any]) -> bool:
        """Return True if a list or dict holds another tensor than when ``places`` were asked."""
        now = self.places()
        return any(now.get(name) != place for name, place in places.items())

    def named(self) -> dict[str, str]:
        """Return the settings in words, by their names."""
        known = {name: repr(what) for (_, name), what in self._facts()}
        known |= {f"a module's {name}": repr(what) for (_, name), what in self._modules.known}
        return known

    def after_call(self, leaves: Sequence[Any], before: dict[Any, Any]) -> None:
        """Leave out what the call has changed; ``before``: ``all_facts`` before it."""
        now = self.all_facts(leaves)
        changed = [name for name in before | now if before.get(name) != now.get(name)]
        self._own.update(changed)
        self._modules.leave_out(changed)
        self._contents.leave_out(self._own)
        self._is_steady = False

    def all_facts(self, leaves: Sequence[Any]) -> dict[Any, Any]:
        """Return the settings, to tell which of them a call changes."""
        found: dict[Any, Any] = dict(self._facts())
        found |= dict(fact for variable in self._variables() for fact in _places(*variable))
        for x in (x for x in leaves if _is_open(type(x))):
            found |= dict(self._of_object(x))
        return found | self._modules.facts()


_known_open: dict[type, bool] = {}


def _is_open(kind: type) -> bool:
    """Return True if the attributes of an object of this type tell what it is."""
    found = _known_open.get(kind)
    if found is None:
        closed = issubclass(kind, (*_OWN_WAYS, *_PLAIN, *_FIXED, torch.Tensor, Enum))
        found = _known_open[kind] = not closed and is_of_the_program(kind)
    return found


def _variable(where: int, name: str, x: Any) -> Iterator[_Fact]:
    """Yield what tells what a variable holds: small lists and dicts count by their items too."""
    yield (where, name), _setting(x)
    if _is_small(x):
        items = _items(x)
        yield (where, f"the items of {name}"), tuple(_setting(key) for key, _ in items)
        for key, held in items:
            if not isinstance(held, torch.Tensor):
                yield (where, f"{name}[{_label(key)}]"), _setting(held)


def _places(where: int, name: str, x: Any) -> Iterator[_Fact]:
    """Yield the addresses of the tensors among a variable's items."""
    for key, held in _items(x) if _is_small(x) else ():
        if isinstance(held, torch.Tensor) and not is_lazy(held) and held.layout is torch.strided:
            place = memory(held), held.storage_offset(), held.shape, held.stride(), held.dtype
            yield (where, f"the place of {name}[{_label(key)}]"), place


def _label(key: Any) -> str:
    """Return a text for a key; no code of the program runs, and no tensor is read."""
    return repr(key) if type(key) in _PLAIN else f"{type(key).__name__} at {id(key):#x}"


def _is_small(x: Any) -> bool:
    return type(x) in (list, dict) and len(x) <= _FEW


def _items(x: Any) -> list[tuple[Any, Any]]:
    return list(x.items() if isinstance(x, dict) else enumerate(x))


def _setting(x: Any, depth: int = 0, names: frozenset[str] | None = None) -> Any:
    """Return what tells a setting from another: the value of plain ones, else which object.

    Lists, dicts, sets and objects count by what they hold down to ``depth``, below that as
    themselves. Of objects, attributes in ``names`` count, or all of them.
    """
    if isinstance(x, _PLAIN):
        return type(x), x
    if isinstance(x, tuple) or (depth and isinstance(x, list) and len(x) <= _FEW):
        return type(x), tuple(_setting(one, depth - 1 if depth else 0, names) for one in x)
    if depth and type(x) is dict and len(x) <= _FEW:
        return tuple((_setting(key), _setting(held, depth - 1, names)) for key, held in x.items())
    if depth and type(x) is set and len(x) <= _FEW:
        return set, frozenset(map(_setting, x))
    if depth and _is_open(type(x)):
        held = attributes(x).items()
        read = {name: one for name, one in held if is_read(x, name, names)}
        return Same(x), _setting(read, depth - 1, names)
    return Same(x)


def _variables(fn: Any) -> Iterator[tuple[int, str]]:
    """Yield the cells of a function's closure, by id, with their names."""
    inner = getattr(fn, "__func__", fn)
    cells = getattr(inner, "__closure__", None) or ()
    for name, cell in zip(inner.__code__.co_freevars if cells else (), cells, strict=True):
        yield id(cell), name
