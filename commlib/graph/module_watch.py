"""Which modules have changed: an attribute, a parameter, a buffer, a part or a hook of theirs.

Nothing is asked at a replay but whether something has changed: torch tells of parameters, buffers
and parts that are registered, and ``nn.Module.__setattr__`` of attributes.
"""

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from commlib.graph.externals import at_addresses

_Fact = tuple[str, Any]

_watched: dict[int, "weakref.WeakSet[ModuleWatch]"] = {}  # by id of a module
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_WITH_ADDRESS = (torch.Tensor, torch.nn.Parameter)
_PARTS = ("_parameters", "_buffers", "_modules")


class ModuleWatch:
    """Modules whose changes are noticed."""

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []
        self._hooks_made = -1
        self._own: set[tuple[int, str]] = set()
        self._changed = True
        self.known: tuple[tuple[tuple[int, str], Any], ...] = ()  # facts when they were last asked
        self._tensors: list[torch.Tensor] = []  # parameters and buffers, and where they lie
        self._pointers: list[int] = []
        self._hooked: list[tuple[dict[Any, Any], int]] = []  # hooks that may be removed
        self._positions: list[int] = []

    def add(self, modules: Iterable[torch.nn.Module]) -> None:
        """Watch some more."""
        _have_changes_told()
        known = set(map(id, self.modules))
        for module in modules:
            if id(module) not in known:
                self.modules.append(module)
                _watch(module, self)

    @property
    def changed(self) -> bool:
        """Return True if a module may have changed since ``facts()`` was asked."""
        return (
            self._changed
            or self._hooks_made != RemovableHandle.next_id
            or bool(self._hooked and any(len(x) != number for x, number in self._hooked))
            or bool(
                self._tensors and not at_addresses(self._tensors, self._pointers, self._positions)
            )
        )

    def note(self) -> None:
        """Know that a module has changed."""
        self._changed = True

    def facts(self) -> dict[tuple[int, str], Any]:
        """Return what the modules hold, but for what the function itself changes."""
        self._changed, self._hooks_made = False, RemovableHandle.next_id
        held = (x for module in self.modules for x in _hooks_of(module))
        self._hooked = [(hooks, len(hooks)) for hooks in held if hooks]
        self._tensors = [x for x in self.tensors() if type(x) in _WITH_ADDRESS]
        self._pointers = [x.data_ptr() for x in self._tensors]
        self._positions = list(range(len(self._tensors)))
        found: dict[tuple[int, str], Any] = {(0, "addresses"): tuple(self._pointers)}
        return found | {
            (id(module), name): what
            for module in self.modules
            for name, what in _facts(module)
            if (id(module), name) not in self._own
        }

    def leave_out(self, names: Iterable[tuple[int, str]]) -> None:
        """Forget facts that a call of the function has changed: they are its own state."""
        self._own.update(names)
        self._changed = True

    def tensors(self) -> list[torch.Tensor]:
        """Return parameters and buffers of all modules."""
        parts = (
            x for each in self.modules for name in _PARTS[:2] for x in vars(each)[name].values()
        )
        return [x for x in parts if x is not None]


def _facts(module: torch.nn.Module) -> Iterable[_Fact]:
    """Yield an attribute by its value where that is plain, and else by which object it is."""
    for name, found in list(vars(module).items()):
        if name in _PARTS:
            yield from ((f"{name}.{part}", Same(x)) for part, x in found.items())
        elif name.endswith("_hooks") and isinstance(found, dict):
            yield name, tuple(map(Same, found.values()))
        elif isinstance(found, _PLAIN):
            yield name, (type(found), found)
        elif isinstance(found, tuple) and all(isinstance(x, _PLAIN) for x in found):
            yield name, found
        elif callable(found) and not isinstance(found, torch.Tensor):
            yield name, Same(found)


def _hooks_of(module: torch.nn.Module) -> Iterable[dict[Any, Any]]:
    for name, found in vars(module).items():
        if name.endswith("_hooks") and isinstance(found, dict):
            yield found


class Same:
    """Equal to what stands for the same object."""

    __slots__ = ("what",)

    def __init__(self, what: object) -> None:
        self.what = what

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.what is other.what

    def __hash__(self) -> int:
        return id(self.what)

    def __repr__(self) -> str:
        return f"{type(self.what).__name__} at {id(self.what):#x}"


def _watch(module: torch.nn.Module, watch: ModuleWatch) -> None:
    if id(module) not in _watched:
        _watched[id(module)] = weakref.WeakSet()
        weakref.finalize(module, _watched.pop, id(module), None)
    _watched[id(module)].add(watch)


def _tell(module: torch.nn.Module, *_: object) -> None:
    for watch in _watched.get(id(module), ()):
        watch.note()


_plain_setattr = torch.nn.Module.__setattr__


def _noted_setattr(self: torch.nn.Module, name: str, value: Any) -> None:
    if id(self) in _watched:
        _tell(self)
    _plain_setattr(self, name, value)


@cache
def _have_changes_told() -> None:
    """Have modules tell of their changes, from the first one on that is watched."""
    torch.nn.Module.__setattr__ = _noted_setattr  # type: ignore[method-assign]
    torch_modules.register_module_parameter_registration_hook(_tell)
    torch_modules.register_module_buffer_registration_hook(_tell)
    torch_modules.register_module_module_registration_hook(_tell)
