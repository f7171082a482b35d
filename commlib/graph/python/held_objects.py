"""Contents of Python objects, recorded to restore them and to find changes."""

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, MutableMapping
from functools import lru_cache, partial
from types import CellType
from typing import Any

import numpy as np
import torch

from commlib.graph.python.changes import GONE, NO_PLACE, Change, Place
from commlib.graph.python.global_names import Name
from commlib.graph.python.held_values import OfTensor
from commlib.graph.python.reach import RANDOM, dict_of, in_slots, slots
from commlib.graph.python.user_names import kind_name

_DICTS = (dict, OrderedDict, defaultdict)
CONTAINERS = {*_DICTS, list, set}
_ACCESS = ("__iter__", "__setitem__", "__getitem__", "clear", "get")  # that a subclass may change


class _Items:
    """A dict, or the attributes of an object, which are one."""

    def __init__(
        self, target: MutableMapping[Any, Any], kept: dict[Any, Any], of: object, *, dots: bool
    ) -> None:
        self._target, self._kept, self._of, self._dots = target, kept, of, dots

    def restore(self) -> None:
        if list(self._target) != list(self._kept):
            self._target.clear()
        for name, value in self._kept.items():
            if self._target.get(name, GONE) is not value:
                self._target[name] = value

    def changes(self) -> Iterator[Change]:
        for name in {**self._kept, **self._target}:
            now = self._target.get(name, GONE)
            if now is not self._kept.get(name, GONE):
                kind = kind_name(self._of)
                text = f"{kind}.{name}" if self._dots else f"item {name!r:.40} of a {kind}"
                before = self._kept.get(name, GONE)
                read = partial(self._target.get, name)
                bind = partial(self._target.__setitem__, name)
                if isinstance(self._of, torch.nn.Module) and isinstance(now, torch.Tensor):
                    bind = partial(setattr, self._of, name)  # watched modules report it
                yield Change(id(self._of), text, before, now, Place(read, bind))
        if not self._dots and len(self._target) != len(self._kept):
            text, was = "the length of a dict", len(self._kept)
            yield Change(id(self._of), text, was, len(self._target), NO_PLACE)


class Empty:
    """Dicts, lists and sets that hold nothing, and tensors without attributes."""

    def __init__(self, targets: list[Any], tensors: list[torch.Tensor]) -> None:
        self._targets, self._tensors = targets, tensors

    def restore(self) -> None:
        """Empty them again."""
        for target in self._targets:
            if target:
                target.clear()
        for x in self._tensors:
            if x.__dict__:
                OfTensor(x, bare=True).restore()

    def changes(self) -> Iterator[Change]:
        """Yield what they hold now."""
        for target in self._targets:
            if target:
                is_dict = isinstance(target, dict)
                held = _Items(target, {}, target, dots=False) if is_dict else _Sequence(target, [])
                yield from held.changes()
        for x in self._tensors:
            if x.__dict__:
                yield from OfTensor(x, bare=True).changes()


class _Sequence:
    """A list, a set or a deque."""

    def __init__(self, target: Any, kept: list[Any]) -> None:
        self._target, self._kept = target, kept

    def restore(self) -> None:
        if len(self._target) != len(self._kept) or any(
            a is not b for a, b in zip(self._target, self._kept, strict=True)
        ):
            self._target.clear()
            add = self._target.update if isinstance(self._target, set) else self._target.extend
            add(self._kept)

    def changes(self) -> Iterator[Change]:
        kind, now = type(self._target).__name__, list(self._target)
        if len(now) != len(self._kept):
            text = f"the length of a {kind}"
            yield Change(id(self._target), text, len(self._kept), len(now), NO_PLACE)
            return
        for i, (before, after) in enumerate(zip(self._kept, now, strict=True)):
            if before is not after:
                binding = NO_PLACE
                if kind != "set":
                    read = partial(self._target.__getitem__, i)
                    binding = Place(read, partial(self._target.__setitem__, i))
                yield Change(id(self._target), f"item {i} of a {kind}", before, after, binding)


class _Variable:
    """A variable of a closure, or a global one."""

    def __init__(self, x: CellType | Name) -> None:
        self._x, self._kept = x, _value_of(x)

    def restore(self) -> None:
        if self._kept is not GONE and _value_of(self._x) is not self._kept:
            self._bind(self._kept)

    def changes(self) -> Iterator[Change]:
        now = _value_of(self._x)
        if now is not self._kept:
            name = self._x.name if isinstance(self._x, Name) else "a variable of its closure"
            binding = Place(partial(_value_of, self._x), self._bind)
            yield Change(id(self._x), str(name), self._kept, now, binding)

    def _bind(self, value: Any) -> None:
        if isinstance(self._x, Name):
            self._x.names[self._x.name] = value
        else:
            self._x.cell_contents = value


class _Slots:
    """The attributes of an object that are in its slots."""

    def __init__(self, target: object) -> None:
        self._target, self._kept = target, self._now(target)

    @staticmethod
    def _now(target: object) -> dict[str, Any]:
        kind: Any = type(target)
        return dict.fromkeys(slots(kind), GONE) | in_slots(target)

    def restore(self) -> None:
        for name, value in self._kept.items():
            if value is not GONE and self._now(self._target)[name] is not value:
                object.__setattr__(self._target, name, value)

    def changes(self) -> Iterator[Change]:
        for name, now in self._now(self._target).items():
            before = self._kept[name]
            if now is not before:
                text = f"{kind_name(self._target)}.{name}"
                read = partial(getattr, self._target, name)
                binding = Place(read, partial(object.__setattr__, self._target, name))
                yield Change(id(self._target), text, before, now, binding)


class _Class:
    """The attributes of a class of the program."""

    def __init__(self, target: type) -> None:
        self._target, self._kept = target, _own(target)

    def restore(self) -> None:
        for name in _own(self._target).keys() - self._kept.keys():
            delattr(self._target, name)
        for name, value in self._kept.items():
            if vars(self._target).get(name, GONE) is not value:
                setattr(self._target, name, value)

    def changes(self) -> Iterator[Change]:
        present = _own(self._target)
        for name in {**self._kept, **present}:
            now = present.get(name, GONE)
            if now is not self._kept.get(name, GONE):
                text = f"{self._target.__name__}.{name}"
                read = partial(vars(self._target).get, name)
                binding, before = (
                    Place(read, partial(setattr, self._target, name)),
                    self._kept.get(name, GONE),
                )
                yield Change(id(self._target), text, before, now, binding)


class _Generator:
    """A generator of torch, which the program holds."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._kept = generator, generator.get_state()

    def restore(self) -> None:
        self._generator.set_state(self._kept)

    def changes(self) -> Iterator[Change]:
        yield from ()  # draws go on at replays


class _Drawn:
    """A generator of Python or NumPy, which the program holds."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        if isinstance(generator, random.Random):
            self._kept: Any = generator.getstate()
        elif isinstance(generator, np.random.RandomState):
            self._kept = generator.get_state()
        else:
            self._kept = copy.deepcopy(generator.bit_generator.state)

    def restore(self) -> None:
        if isinstance(self._generator, random.Random):
            self._generator.setstate(self._kept)
        elif isinstance(self._generator, np.random.RandomState):
            self._generator.set_state(self._kept)
        else:
            self._generator.bit_generator.state = self._kept

    def changes(self) -> Iterator[Change]:
        yield from ()  # what is drawn shows in the numbers of operators


def held(x: Any) -> Iterator[Any]:
    """Yield what remembers the content of an object, for each kind of content that it has."""
    if isinstance(x, Name | CellType):
        yield _Variable(x)
    elif isinstance(x, torch.Generator):
        yield _Generator(x)
    elif isinstance(x, RANDOM):
        yield _Drawn(x)
    elif isinstance(x, type):
        yield _Class(x)
    elif type(x) in _DICTS:
        yield _Items(x, dict(x), x, dots=False)
    elif type(x) in (list, set, deque):
        yield _Sequence(x, list(x))
    else:
        kind: Any = type(x)
        container = _kept_as(kind)
        if container is dict:
            yield _Items(x, dict(x), x, dots=False)
        elif container is not None:
            yield _Sequence(x, list(x))
        if slots(kind):
            yield _Slots(x)
        attributes = dict_of(x)
        if type(attributes) is dict:
            yield _Items(attributes, dict(attributes), x, dots=True)


@lru_cache(maxsize=10_000)
def _kept_as(kind: type) -> type | None:
    """Return the container that keeps things as objects of this class do; None without one."""
    for container in (dict, list, set, deque):
        methods = [name for name in _ACCESS if hasattr(container, name)]
        if issubclass(kind, container) and all(
            getattr(kind, name) is getattr(container, name) for name in methods
        ):
            return container
    return None


def _value_of(x: CellType | Name) -> Any:
    if isinstance(x, Name):
        return x.names.get(x.name, GONE)
    try:
        return x.cell_contents
    except ValueError:  # a variable without a value
        return GONE


def _own(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("__")}
