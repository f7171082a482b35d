"""Detection of changed modules: attributes, parameters, buffers, submodules and hooks.

A replay only checks whether something has changed. torch reports registered parameters, buffers
and submodules, and ``nn.Module.__setattr__`` reports attributes.
"""

import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from commlib.graph.python.read_names import is_read
from commlib.graph.recording.externals import at_addresses

_Fact = tuple[str, Any]

_watched: dict[int, "weakref.WeakSet[ModuleWatch]"] = {}  # by id of a module
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_WITH_ADDRESS = (torch.Tensor, torch.nn.Parameter)
_GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = (
    torch_modules._global_forward_pre_hooks,
    torch_modules._global_forward_hooks,
    torch_modules._global_backward_pre_hooks,
    torch_modules._global_backward_hooks,
)
_PARTS = ("_parameters", "_buffers", "_modules")


class ModuleWatch:
    """A set of modules whose changes are detected."""

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []
        self._names: frozenset[str] | None = None  # of attributes that are read; None for any
        self._hooks_made = -1
        self._own: set[tuple[int, str]] = set()
        self._changed = True
        self.known: tuple[tuple[tuple[int, str], Any], ...] = ()  # the last facts
        self._tensors: list[torch.Tensor] = []  # parameters and buffers, and their addresses
        self._pointers: list[int] = []
        self._hooked: list[tuple[dict[Any, Any], int]] = []  # hooks that may be removed
        self._positions: list[int] = []

    def add(self, modules: Iterable[torch.nn.Module]) -> None:
        """Watch more modules."""
        _install_hooks()
        watched = set(map(id, self.modules))
        for module in modules:
            if id(module) not in watched:
                self.modules.append(module)
                _watch(module, self)

    @property
    def changed(self) -> bool:
        """Return True if a module may have changed since the last ``facts()``."""
        return (
            self._changed
            or self._hooks_made != RemovableHandle.next_id
            or bool(self._hooked and any(len(x) != number for x, number in self._hooked))
            or bool(
                self._tensors and not at_addresses(self._tensors, self._pointers, self._positions)
            )
        )

    def note(self) -> None:
        """Record that a module has changed."""
        self._changed = True

    def note_attribute(self, module: torch.nn.Module, name: str) -> None:
        """Record that an attribute was set."""
        if is_read(module, name, self._names):
            self._changed = True

    def read_only(self, names: frozenset[str] | None) -> None:
        """Leave out attributes with other names than these; None: leave out none."""
        if names != self._names:
            self._names, self._changed = names, True

    def facts(self) -> dict[tuple[int, str], Any]:
        """Return the state of the modules without the state that the function itself changes."""
        self._changed, self._hooks_made = False, RemovableHandle.next_id
        all_hooks = chain(_GLOBAL_HOOKS, *map(_hooks_of, self.modules))
        self._hooked = [(hooks, len(hooks)) for hooks in all_hooks if hooks]
        self._tensors = [x for x in self.tensors() if type(x) in _WITH_ADDRESS]
        self._pointers = [x.data_ptr() for x in self._tensors]
        self._positions = list(range(len(self._tensors)))
        common: dict[tuple[int, str], Any] = {(0, "addresses"): tuple(self._pointers)}
        common[0, "hooks of all modules"] = tuple(
            Same(hook) for hooks in _GLOBAL_HOOKS for hook in hooks.values()
        )
        return common | {
            (id(module), name): fact
            for module in self.modules
            for name, fact in _facts(module, self._names)
            if (id(module), name) not in self._own
        }

    def leave_out(self, names: Iterable[tuple[int, str]]) -> None:
        """Ignore facts that a call of the function has changed: they are its own state."""
        self._own.update(names)
        self._changed = True

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers of all modules."""
        held = (vars(each).get(name, {}) for each in self.modules for name in _PARTS[:2])
        return [x for parts in held for x in parts.values() if x is not None]


def _facts(module: torch.nn.Module, names: frozenset[str] | None) -> Iterable[_Fact]:
    """Yield each attribute in ``names`` by its value if that is plain, else by identity."""
    for name, value in list(vars(module).items()):
        if name in _PARTS:
            yield from ((f"{name}.{part}", Same(x)) for part, x in value.items())
        elif name.endswith("_hooks") and isinstance(value, dict):
            yield name, tuple(map(Same, value.values()))
        elif not is_read(module, name, names):
            continue
        elif isinstance(value, _PLAIN):
            yield name, (type(value), value)
        elif isinstance(value, tuple) and all(isinstance(x, _PLAIN) for x in value):
            yield name, value
        elif callable(value) and not isinstance(value, torch.Tensor):
            yield name, Same(value)
    if isinstance(module, torch.jit.ScriptModule):
        yield from _facts_of_script(module)


def _facts_of_script(module: Any) -> Iterator[_Fact]:
    """Yield the attributes of a scripted module, which are TorchScript's."""
    for name in module._concrete_type.get_attributes():
        value = getattr(module, name)
        if not isinstance(value, torch.Tensor):  # these are parameters and buffers
            yield name, repr(value)


def _hooks_of(module: torch.nn.Module) -> Iterable[dict[Any, Any]]:
    for name, value in vars(module).items():
        if name.endswith("_hooks") and isinstance(value, dict):
            yield value


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
        return f"{type(self._object).__name__} at {id(self._object):#x}"


def _watch(module: torch.nn.Module, watch: ModuleWatch) -> None:
    if id(module) not in _watched:
        _watched[id(module)] = weakref.WeakSet()
        weakref.finalize(module, _watched.pop, id(module), None)
    _watched[id(module)].add(watch)


def _notify(module: torch.nn.Module, *_: object) -> None:
    for watch in _watched.get(id(module), ()):
        watch.note()


def _note_attributes(kind: type[torch.nn.Module]) -> None:
    """Have modules of a class report the attributes that are set."""
    plain = kind.__setattr__

    def noted(self: torch.nn.Module, name: str, value: Any) -> None:
        for watch in _watched.get(id(self), ()):
            watch.note_attribute(self, name)
        plain(self, name, value)

    kind.__setattr__ = noted  # type: ignore[method-assign]


@cache
def _install_hooks() -> None:
    """Have all modules report their changes, once the first one is watched."""
    _note_attributes(torch.nn.Module)
    _note_attributes(torch.jit.RecursiveScriptModule)
    torch_modules.register_module_parameter_registration_hook(_notify)
    torch_modules.register_module_buffer_registration_hook(_notify)
    torch_modules.register_module_module_registration_hook(_notify)
