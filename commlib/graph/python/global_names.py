"""Global names that code reads: in its module, and in modules that it names or imports."""

import sys
from collections.abc import Container, Iterable, Iterator
from functools import lru_cache
from importlib.util import resolve_name
from sysconfig import get_path
from types import CellType, FunctionType, ModuleType
from typing import Any

from commlib.graph.python.code_names import names_of

# Libraries whose objects belong to them: what they count, they count for the whole process.
FOREIGN = {"commlib", "cupy", "numpy", *sys.stdlib_module_names}
INSTALLED = tuple({get_path("purelib"), get_path("platlib"), get_path("stdlib")})
_ENDS = FOREIGN | {"torch", "torchgen"}


class Name:
    """One global name of a module, with what it names."""

    __slots__ = ("name", "names")

    def __init__(self, names: dict[str, Any], name: str) -> None:
        self.names, self.name = names, name


def names_in(fn: FunctionType) -> list[Name]:
    """Return the global names that a function reads; none for code of installed packages.

    These are thousands of names, which no program replaces.
    """
    if fn.__code__.co_filename.startswith(INSTALLED):
        return []
    code_names = names_of(fn.__code__)
    names = [Name(fn.__globals__, name) for name in code_names.looked_up & fn.__globals__.keys()]
    named = [each.names[each.name] for each in names]
    named += [cell.cell_contents for cell in fn.__closure__ or () if not _is_empty(cell)]
    if code_names.imported:
        named += imported_by(fn)
    for module in modules_through(named, code_names.read, _ENDS) if named else ():
        names += [Name(vars(module), name) for name in code_names.read & vars(module).keys()]
    return names


def _is_empty(cell: CellType) -> bool:
    """Return True for a variable of a closure that has no value yet."""
    try:
        cell.cell_contents  # noqa: B018 - it raises
    except ValueError:
        return True
    return False


def imported_by(fn: FunctionType) -> Iterator[ModuleType | None]:
    """Yield the modules that code imports where it runs; None for one that was not imported yet.

    ``import a.b`` names ``a``, and makes ``b`` readable in it.
    """
    for text in names_of(fn.__code__).imported:
        try:
            full_name = resolve_name(text, str(fn.__globals__.get("__package__") or ""))
        except ImportError:  # relative to no package
            yield None
            continue
        parts = full_name.split(".")
        yield from (sys.modules.get(".".join(parts[: i + 1])) for i in range(len(parts)))


def modules_through(
    roots: Iterable[Any], read: Iterable[str], ends: Container[str]
) -> list[ModuleType]:
    """Return the modules among ``roots``, and those that reading attributes leads to.

    ``ends``: packages whose modules are left out.
    """
    left, modules = list(roots), dict[int, ModuleType]()
    while left:
        x = left.pop()
        if not isinstance(x, ModuleType) or id(x) in modules or root_of(x.__name__) in ends:
            continue
        modules[id(x)] = x
        left += [vars(x).get(name) for name in read]
    return [*modules.values()]


def root_of(module: object) -> str:
    """Return the first part of a module's name."""
    return str(module).partition(".")[0]


@lru_cache(maxsize=10_000)
def has_state(kind: type) -> bool:
    """Return True for a class of the program: those of installed packages keep no state."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return bool(file) and not file.startswith(INSTALLED)
