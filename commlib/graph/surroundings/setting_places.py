"""The places where a function finds its settings, and what is there now."""

from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from operator import attrgetter
from types import CellType, FunctionType
from typing import Any, NamedTuple
from weakref import ref

import torch

from commlib.graph.python.contents import Fact, Place
from commlib.graph.python.global_names import INSTALLED, Name
from commlib.graph.python.reach import (
    attributes,
    class_values,
    content,
    dict_of,
    given_to,
    reached,
)
from commlib.graph.python.read_names import ASKING, is_read, names_read
from commlib.graph.python.setting import FIXED, is_frozen, is_open, setting

_MOST = 2000  # attributes of plain objects that are asked at every call
_CONTAINERS = ("builtins", "collections")
_WRAPS = (UserDict, UserList, ChainMap)  # containers that have what they hold in an attribute
_DEFAULTS = ("__defaults__", "__kwdefaults__")  # of the function itself
_OF_OPTIMIZERS = ("param_groups", "state", "defaults")  # that are known in other ways
_OF_MODULES = frozenset(vars(torch.nn.Module()))  # likewise
_PLAIN_ACCESS = object.__getattribute__
_MANY = 4  # attributes of one object, from which on its version is asked first


def _find_version() -> Callable[[dict[Any, Any]], int] | None:
    """Return torch's function for another number after each change of a dict, where it works."""
    get_version: Callable[[dict[Any, Any]], int] | None = getattr(
        torch._C._dynamo.guards, "dict_version", None
    )
    try:
        if get_version is not None:
            get_version({})
    except RuntimeError:  # this Python has no such number
        return None
    return get_version


_version = _find_version()


class Variable(NamedTuple):
    """A variable of a closure, or a global name.

    Attributes:
        where: Whose it is.
        name: Its name.
        read: Returns what it holds.
    """

    where: int
    name: str
    read: Callable[[], Any]


class SettingPlaces:
    """The variables and objects where a function finds settings, as they were at one moment.

    Attributes:
        modules: The modules that the function can reach.
        optimizers: Its optimizers.
        tensors: Its tensors, by weak references: these keep none alive that is replaced.
        variables: Variables of closures, and global names.
        objects: Objects with the names of their attributes that count.
        has_versions: Whether ``versions`` are asked.
        is_empty: Whether nothing is asked.
    """

    def __init__(
        self, fn: Callable[..., Any], names: frozenset[str] | None, hooks: Iterable[Any] = ()
    ) -> None:
        """Look for places.

        Args:
            fn: The function.
            names: Attributes that it may read; None for any.
            hooks: Those of all modules and optimizers, which its run may call.
        """
        self._names, self._fn = names, fn
        followed = None if names is None else partial(names_read, names=names)
        reachable = reached([fn, *hooks], followed=followed)
        objects = reachable.objects
        self.tensors = [*map(ref, reachable.tensors)]
        self.modules = [x for x in objects if isinstance(x, torch.nn.Module)]
        self.optimizers = [x for x in objects if isinstance(x, torch.optim.Optimizer)]
        self.variables = [*{each[:2]: each for each in self._find_variables(objects)}.values()]
        self.objects: list[tuple[Any, list[str]]] = []
        self._single: list[Callable[[], Any]] = [each.read for each in self.variables]
        self._groups: list[tuple[Callable[[Any], Any], Any]] = []
        self._dicts: list[tuple[dict[str, Any], list[str]]] = []
        # Attributes of tensors: only code that asks whether there is one gets along without it.
        asks = names is None or not ASKING.isdisjoint(names)
        self._given = {id(x): given_to(x) for x in reachable.tensors if asks or x.__dict__}
        of_tensors = self._of_tensors() if self._given else ()
        self._single += [partial(self._given[obj_id].get, name) for obj_id, name, _ in of_tensors]
        budget = _MOST
        for x in objects:
            read = self._attributes_of(x)[:budget]
            budget -= len(read)
            if read:
                self.objects.append((x, read))
                self._ask(x, read)
        self.has_versions = bool(self._dicts or self._given)
        self.is_empty = not (self._single or self._groups or self.has_versions)

    def _find_variables(self, objects: list[Any]) -> Iterator[Variable]:
        """Yield those of the function itself first."""
        inner = getattr(self._fn, "__func__", self._fn)
        for fn in (inner, *objects):
            if isinstance(fn, FunctionType):
                code = fn.__code__
                fixed = FIXED if fn is not inner and code.co_filename.startswith(INSTALLED) else ()
                for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
                    if not (name == "__class__" or isinstance(content(cell), fixed)):
                        yield Variable(id(cell), name, partial(content, cell))
        for x in objects:
            if isinstance(x, Name) and not isinstance(x.names.get(x.name), FIXED):
                yield Variable(id(x.names), x.name, partial(x.names.get, x.name))

    def _of_tensors(self) -> Iterator[Place]:
        """Yield the attributes of tensors that the function may read."""
        for obj_id, held in self._given.items():
            for name, x in [*held.items()]:
                if self._names is None or name in self._names:
                    yield Place(obj_id, name, x)

    def _attributes_of(self, x: Any) -> list[str]:
        """Return the attributes of an object that the function may read; of a class, its values."""
        kind: Any = type(x)
        if _keeps_no_setting(kind):
            return []
        inner = getattr(self._fn, "__func__", self._fn)
        if isinstance(x, FunctionType):
            return [name for name in _DEFAULTS if x is inner and getattr(x, name)]
        if isinstance(x, type):
            return [name for name in class_values(x) if is_read(x, name, self._names)]
        always = ["__class__"] if is_open(kind) else []
        names = (name for name in attributes(x) if isinstance(name, str))
        attrs = always + [name for name in names if is_read(x, name, self._names)]
        if isinstance(x, torch.optim.Optimizer):
            attrs = [x for x in attrs if x not in _OF_OPTIMIZERS and not x.endswith("_hooks")]
        return attrs

    def _ask(self, x: Any, names: list[str]) -> None:
        """Ask for attributes of an object at each call, in the way that takes the least time."""
        kind: Any = type(x)
        held = dict_of(x)
        if is_frozen(kind):
            return
        if _version is not None and len(names) > _MANY and type(held) is dict:
            self._dicts.append((held, [name for name in names if name in held]))
            names = ["__dict__", *(name for name in names if name not in held)]
        elif type(held) is dict:
            self._single.append(partial(len, held))  # a new attribute
        if len(names) == 1 or isinstance(x, type) or kind.__getattribute__ is not _PLAIN_ACCESS:
            self._single += [partial(getattr, x, name, None) for name in names]
        else:
            self._groups.append((attrgetter(*names), x))

    def facts(self) -> Iterator[Fact]:
        """Yield what variables hold, and the attributes that objects have now."""
        for obj_id, name, read in self.variables:
            yield (obj_id, name), setting(read())
        for x, _ in self.objects:
            for name, held in _values(x, self._attributes_of(x)):
                yield (id(x), name), setting(held)
        for obj_id, name, held in self._of_tensors() if self._given else ():
            yield (obj_id, name), setting(held)

    def containers(self) -> Iterator[Place]:
        """Yield what may be a container: what variables, and attributes of objects, hold now."""
        for variable in self.variables:
            yield Place(variable.where, variable.name, variable.read())
        for x, names in self.objects:
            yield from (Place(id(x), name, held) for name, held in _values(x, names))
        yield from self._of_tensors() if self._given else ()
        for module in self.modules:
            read = names_read(module, self._names)
            for name, x in vars(module).items():
                if name not in _OF_MODULES and (read is None or name in read):
                    yield Place(id(module), name, x)

    def read(self) -> list[Any]:
        """Return what is in all places, but for attributes of ``versions``."""
        values = [read() for read in self._single]
        if not self._groups:
            return values
        try:
            for get, x in self._groups:
                values += get(x)
        except AttributeError:  # one is gone
            return [object()]
        return values

    def versions(self) -> list[int]:
        """Return numbers that are others where one of ``versioned`` may be another."""
        numbers = [_version(held) for held, _ in self._dicts] if _version is not None else []
        if self._given:
            numbers.append(
                sum(map(len, filter(None, self._given.values())))
            )  # 10 ns for an empty one
        return numbers

    def versioned(self) -> list[Any]:
        """Return attributes of objects with many of them."""
        values: list[Any] = [held.get(name) for held, names in self._dicts for name in names]
        values += [len(held) for held, _ in self._dicts]
        return values + [len(held) for held in self._given.values()]


@lru_cache(maxsize=10_000)
def _keeps_no_setting(kind: type) -> bool:
    """Return True for types whose objects have no attributes, or none that are asked here."""
    if issubclass(kind, (FunctionType, type)) or kind in _WRAPS:
        return False
    return kind.__module__ in _CONTAINERS or issubclass(kind, (torch.nn.Module, CellType, Name))


def _values(x: Any, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Return attributes of an object as it holds them: no descriptor of the program runs."""
    if isinstance(x, FunctionType):
        return ((name, getattr(x, name)) for name in names)
    held = vars(x) if isinstance(x, type) else {"__class__": type(x), **attributes(x)}
    return ((name, held.get(name)) for name in names)
