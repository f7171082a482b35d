"""Detection of changed modules: attributes, parameters, buffers, submodules and hooks.

A replay only checks whether something has changed. torch reports registered parameters, buffers
and submodules, ``nn.Module.__setattr__`` reports attributes, and what the dicts of
modules hold is compared.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache, wraps
from itertools import chain, count
from operator import is_
from typing import Any

import torch

from commlib.core.tensors import is_wrapper
from commlib.graph.calls.tensor_addresses import TensorAddresses, has_address
from commlib.graph.python.contents import is_asked
from commlib.graph.python.read_names import is_read, names_read
from commlib.graph.python.setting import Same, setting
from commlib.graph.surroundings.hooks import HookLook

_Fact = tuple[str, Any]

# By id of a module. The tuples are replaced as a whole: other threads go through them.
_watched: dict[int, "tuple[weakref.ref[ModuleWatch], ...]"] = {}
_lock = threading.Lock()
_changes = count(1)
_PARTS = ("_parameters", "_buffers", "_modules")
_END = (object(),)  # of what is compared: no part is that


class ModuleStates:
    """Numbers of what modules held: short parts of keys.

    The ``most`` latest states keep their number. Ranks compare keys, so nothing here depends on
    when garbage is collected.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        self._new = count(1)

    def number(self, facts: tuple[Any, ...]) -> int:
        """Return the number of the state in which modules hold this."""
        state = self._numbers.pop(facts, None)
        state = next(self._new) if state is None else state
        self._numbers[facts] = state  # the last that goes
        if len(self._numbers) > self._most:
            self._numbers.popitem(last=False)
        return state


class ModuleLook:
    """The state of modules at one moment.

    Attributes:
        change: The last change that was reported before it.
        facts: The state, but for what the function itself changes.
        tensors: The parameters and buffers whose memory is compared.
    """

    def __init__(self, watch: "ModuleWatch", change: int) -> None:
        self.change = change
        tensors = [*{id(x): x for x in watch.tensors()}.values()]
        others = (reference() for reference in watch.others)
        self._hooks = HookLook([*watch.modules, *(x for x in others if x is not None), *tensors])
        self.tensors = [x for x in tensors if has_address(x) and not is_wrapper(x)]
        self._addresses = TensorAddresses(self.tensors)
        dicts = (vars(module).get(name) for module in watch.modules for name in _PARTS)
        # Views of dicts show what these hold at any time.
        self._views = [held.values() for held in dicts if held and isinstance(held, dict)]
        self._parts = [*self._held()]
        self.facts: dict[tuple[int, str], Any] = {(0, "addresses"): self._addresses.facts}
        self.facts |= {name: fact for name, fact in self._hooks.facts if name not in watch.own}
        self.facts |= {
            (id(module), name): fact
            for module in watch.modules
            for name, fact in _facts(module, watch.names)
            if (id(module), name) not in watch.own
        }

    def _held(self) -> Iterator[Any]:
        """Return the parameters, buffers and submodules of all modules, and an end."""
        return chain(chain.from_iterable(self._views), _END)

    @property
    def is_old(self) -> bool:
        """Return True if hooks, parts or addresses are others since.

        Parts are asked too: what writes into a module's dicts, as ``module.double()`` does for
        buffers, reports nothing.
        """
        if self._views and not all(map(is_, self._held(), self._parts)):
            return True
        return self._hooks.is_old or not self._addresses.are_of(self.tensors)


class ModuleWatch:
    """A set of modules whose changes are detected.

    Attributes:
        modules: These modules.
        others: Optimizers and tensors whose hooks are watched too, by weak references.
        names: Names of attributes that are read; None for any.
        own: Names of facts that the function changes.

    A look at modules takes effect where it is kept, as one assignment: other threads see all of it
    or nothing. A change that is reported in between makes it old.
    """

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []
        self.others: list[weakref.ref[Any]] = []
        self.names: frozenset[str] | None = None
        self.own: set[tuple[int, str]] = set()
        self._change = 0
        self._look: ModuleLook | None = None

    def add(self, modules: Iterable[torch.nn.Module], others: Iterable[weakref.ref[Any]]) -> None:
        """Watch more modules, and the hooks of these other objects instead of the last ones."""
        _install_hooks()
        watched = set(map(id, self.modules))
        for module in modules:
            if id(module) not in watched:
                self.modules.append(module)
                _watch(module, self)
        self.others = list(others)
        self.note()

    @property
    def known(self) -> dict[tuple[int, str], Any]:
        """Return the facts of the last kept look."""
        return {} if self._look is None else self._look.facts

    @property
    def known_change(self) -> int:
        """Return the last change that was reported before the look that was kept."""
        return 0 if self._look is None else self._look.change

    def compared(self) -> list[torch.Tensor]:
        """Return the parameters and buffers whose memory the kept look compares."""
        return [] if self._look is None else self._look.tensors

    @property
    def is_needed(self) -> bool:
        """Return True if there is something to watch."""
        return bool(self.modules or self.others)

    @property
    def changed(self) -> bool:
        """Return True if a module may have changed since the look that was kept."""
        look = self._look
        return look is None or look.change != self._change or look.is_old

    def note(self) -> None:
        """Record that a module has changed."""
        self._change = next(_changes)  # a number that no other thread gets

    def note_attribute(self, module: torch.nn.Module, name: str) -> None:
        """Record that an attribute was set."""
        parts = (vars(module).get(part, ()) for part in _PARTS)
        counts = name == "__class__" or is_read(module, name, self.names)
        if counts or any(name in part for part in parts):
            self.note()

    def look(self) -> ModuleLook:
        """Return the state of the modules."""
        return ModuleLook(self, self._change)

    def keep(self, look: ModuleLook) -> None:
        """Compare with this look from now on."""
        self._look = look

    def leave_out(self, names: Iterable[tuple[int, str]]) -> None:
        """Ignore facts that a call of the function has changed: they are its own state."""
        self.own.update(names)
        self.note()

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers of all modules."""
        held = (vars(each).get(name, {}) for each in self.modules for name in _PARTS[:2])
        return [x for parts in held for x in parts.values() if x is not None]

    def tensor_attributes(self) -> Iterator[tuple[tuple[Hashable, ...], torch.Tensor]]:
        """Yield the tensors that modules have as plain attributes."""
        for module in self.modules:
            for name, value in _attributes(module, self.names):
                if isinstance(value, torch.Tensor):
                    yield (id(module), name), value


def _attributes(module: torch.nn.Module, names: frozenset[str] | None) -> Iterator[_Fact]:
    """Yield the plain attributes in ``names`` of a module."""
    read = names_read(module, names)
    for name, value in list(vars(module).items()):
        if name not in _PARTS and not name.endswith("_hooks") and (read is None or name in read):
            yield name, value


def _facts(module: torch.nn.Module, names: frozenset[str] | None) -> Iterable[_Fact]:
    """Yield the class, and each attribute in ``names`` by its setting.

    Containers that count by content, tensors and hooks are left out.
    """
    yield "__class__", Same(type(module))
    for name in _PARTS:
        held = vars(module).get(name, {})  # scripted modules have no such dict
        yield from ((f"{name}.{part}", Same(x)) for part, x in held.items())
    for name, value in _attributes(module, names):
        if not isinstance(value, torch.Tensor) and not is_asked(value):
            yield name, setting(value)
    if isinstance(module, torch.jit.ScriptModule):
        yield from _facts_of_script(module)


def _facts_of_script(module: Any) -> Iterator[_Fact]:
    """Yield the attributes of a scripted module, which are TorchScript's."""
    for name in module._concrete_type.get_attributes():
        value = getattr(module, name)
        if not isinstance(value, torch.Tensor):  # these are parameters and buffers
            yield name, repr(value)


def _watch(module: torch.nn.Module, watch: ModuleWatch) -> None:
    with _lock:
        if id(module) not in _watched:
            weakref.finalize(module, _watched.pop, id(module), None)
        alive = (each for each in _watched.get(id(module), ()) if each() is not None)
        _watched[id(module)] = *alive, weakref.ref(watch)


def _watches_of(module: torch.nn.Module) -> Iterator[ModuleWatch]:
    for reference in _watched.get(id(module), ()):
        watch = reference()
        if watch is not None:
            yield watch


def _note_attributes(kind: type[torch.nn.Module]) -> None:
    """Have modules of a class report the attributes that were set or deleted.

    They report after the change: another thread may look at them until then.
    """
    for name in ("__setattr__", "__delattr__"):
        setattr(kind, name, _noted(getattr(kind, name)))


def _noted(plain: Callable[..., None]) -> Callable[..., None]:
    @wraps(plain)
    def noted(self: torch.nn.Module, name: str, *value: Any) -> None:
        same = bool(value) and vars(self).get(name, _watched) is value[0]
        plain(self, name, *value)
        for watch in () if same else _watches_of(self):
            if value:
                watch.note_attribute(self, name)
            else:  # it was deleted, and may have been a part
                watch.note()

    return noted


def _note_parts(name: str) -> None:
    """Have modules report what was registered; torch's own hooks are called before that."""
    plain = getattr(torch.nn.Module, name)

    @wraps(plain)
    def noted(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        for watch in _watches_of(self):
            watch.note()

    setattr(torch.nn.Module, name, noted)


@cache
def _install_hooks() -> None:
    """Have all modules report their changes, once the first one is watched."""
    _note_attributes(torch.nn.Module)
    _note_attributes(torch.jit.RecursiveScriptModule)
    for name in ("register_parameter", "register_buffer", "add_module"):
        _note_parts(name)
