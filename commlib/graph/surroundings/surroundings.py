"""Values that a function uses in addition to its arguments, as a part of the cache key."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import torch
from typing_extensions import Self

from commlib.graph.calls.tensor_places import NO_PLACES, Around, Name, Places, TensorPlaces
from commlib.graph.python.contents import MOST_WRITTEN, Contents, Fact, is_asked
from commlib.graph.python.reach import attributes
from commlib.graph.python.read_names import is_read, read_names
from commlib.graph.python.setting import has_settings, setting
from commlib.graph.surroundings.hooks import hooks_of_all
from commlib.graph.surroundings.modules import ModuleStates, ModuleWatch
from commlib.graph.surroundings.setting_places import SettingPlaces

_DEEP = 4  # how far settings of optimizers and objects among arguments are followed
_MANY = 16  # facts that are hashed faster one by one
_numbers = count(1)


class _Watched(NamedTuple):
    """Places and modules that are asked at every call; replaced where they change."""

    places: SettingPlaces
    contents: Contents
    modules: int  # the number of what modules hold
    can_change: bool  # whether there are modules, or others with hooks
    is_asked: bool  # whether there is anything else


_NOTHING = _Watched(SettingPlaces(lambda: None, frozenset()), Contents(), 0, False, False)


class _ManyFacts(tuple[Any, ...]):
    """Facts whose hash is computed once: a key is hashed at every call."""

    _hash: int

    def __new__(cls, facts: tuple[Any, ...]) -> Self:
        self = super().__new__(cls, facts)
        self._hash = hash(facts)
        return self

    def __hash__(self) -> int:
        return self._hash


class _Those(tuple[int, ...]):
    """Identities of objects that ``weights`` keeps alive; ranks compare only how many they are."""

    def __repr__(self) -> str:
        return f"{len(self)} objects"


class _Reading(NamedTuple):
    """A look at what is watched."""

    watched: _Watched
    held: list[Any]  # in places, and the items of containers
    whole: bytes  # the contents of plain containers
    versions: list[int]
    versioned: list[Any]
    facts: tuple[Any, ...]  # what represents all of this in a key
    number: int  # another one where anything is another


class Surroundings:
    """Settings that a function reads from where it can reach: they tell its calls apart.

    These are settings of optimizers' parameter groups, the attributes, parts and hooks of modules,
    variables of closures and modules, and plain attributes of objects there. What the function
    changes itself is its state and no setting.

    Threads share it. ``_watched`` and ``_last`` are replaced as a whole, never changed.
    """

    def __init__(self, fn: Callable[..., Any], max_graphs: int) -> None:
        self._fn = fn
        self._lock = threading.RLock()  # of what replaces ``_watched``
        self._modules = ModuleWatch()
        self.modules = self._modules.modules  # The function can reach these.
        self._names: frozenset[str] | None = frozenset()  # The function may read these; None: any.
        self._states = ModuleStates(2 * max_graphs)  # Those of graphs, and those that calls change.
        self._own: set[Any] = set()  # Calls of the function change these.
        self._kept: dict[Any, list[Any]] = {}  # The keys that count, of containers with other ones.
        self._imported = 0  # Modules of Python when the function was looked at.
        self._watched = _NOTHING
        self._last = _Reading(_NOTHING, [], b"", [], [], (), 0)
        self.weights: list[torch.Tensor] = []
        self.stepped: list[torch.Tensor] = []  # those of them that optimizers have

    def find(self, leaves: Sequence[Any] = ()) -> None:
        """Look for settings; those that are new count from now on.

        ``leaves``: the arguments of a call.
        """
        with self._lock:
            self._imported = len(sys.modules)
            hooks = hooks_of_all()
            names = read_names([self._fn, *leaves, *hooks])
            self._names = None if names is None or self._names is None else self._names | names
            places = SettingPlaces(self._fn, self._names, hooks)
            self._modules.names = self._names
            self._modules.add(places.modules, [*map(ref, places.optimizers), *places.tensors])
            groups = [group for each in places.optimizers for group in each.param_groups]
            self.stepped = [x for group in groups for x in group["params"] if x.is_leaf]
            held = [each.read() for each in places.variables]
            self.weights = _leaves([*self._modules.tensors(), *self.stepped, *held])
            self._watch(places)

    def _watch(self, places: SettingPlaces) -> None:
        """Ask these places from now on, and what modules hold now."""
        can_change, number = self._modules.is_needed, 0
        if not (can_change or places.variables or places.objects):
            self._watched = _NOTHING
            return
        if can_change:
            look = self._modules.look()
            number = self._states.number(tuple(look.facts.items()))
        contents = Contents(places.containers(), self._own, self._kept)
        needed = not (places.is_empty and contents.is_empty)
        self._watched = _Watched(places, contents, number, can_change, needed)
        if can_change:  # last: until then other threads find that modules have changed
            self._modules.keep(look)

    @property
    def is_needed(self) -> bool:
        """Return True if anything is asked."""
        return self._watched.is_asked or self._watched.can_change

    def key(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the settings as they are now, of objects among the arguments too."""
        if self._watched.can_change and self._modules.changed:
            watched = self._watch_again()
        else:  # read after the question: another thread may have looked between the two
            watched = self._watched
        facts = self._facts_of(watched) if watched.is_asked else ()
        settings, excluded = (watched.modules, facts), self._own
        if watched.places.optimizers:
            groups = _groups(watched.places)
            settings = (*settings, *(value for name, value in groups if name not in excluded))
        objects = [*filter(has_settings, leaves)] if leaves else ()
        if not objects:
            return settings
        asked = chain(*map(self._of_object, objects))
        return (*settings, *(value for name, value in asked if name not in excluded))

    def _facts_of(self, watched: _Watched) -> tuple[Any, ...]:
        """Return what represents the settings in places and containers."""
        places, contents = watched.places, watched.contents
        held, data, versions = places.read(), b"", []
        if not contents.is_empty:
            held += contents.items()
            data = contents.whole
            # One holds something else than plain values now, or far more than when it was asked.
            if (contents.has_plain and not data) or len(data) > MOST_WRITTEN:
                return self._facts_of(self._watch_again())
        if places.has_versions:
            versions = places.versions()
        last, was_held, was_whole, had_versions, _, facts, _ = self._last
        steady = last is watched and data == was_whole and len(held) == len(was_held)
        if steady and all(map(is_, held, was_held)) and versions == had_versions:
            return facts
        if last is watched:
            before, versioned = (was_held, self._last.versioned), watched.places.versioned()
            if any(map(_have_new_containers, before, (held, versioned))):
                return self._facts_of(self._look_into_containers())
        return self._read(watched, held, data, versions).facts

    def _look_into_containers(self) -> _Watched:
        """Look at what containers hold now; of what another thread has found since, too."""
        with self._lock:
            watched = self._watched
            contents = Contents(watched.places.containers(), self._own, self._kept)
            needed = not (watched.places.is_empty and contents.is_empty)
            self._watched = watched._replace(contents=contents, is_asked=needed)
            return self._watched

    def _watch_again(self) -> _Watched:
        """Look at what containers and modules hold now."""
        with self._lock:
            self._watch(self._watched.places)
            return self._watched

    def _read(
        self, watched: _Watched, held: list[Any], whole: bytes, versions: list[int]
    ) -> _Reading:
        """Return what represents something that was read; the last look where it is the same."""
        last, versioned = self._last, watched.places.versioned()
        before, now = (last.whole, *last.held, *last.versioned), (whole, *held, *versioned)
        is_same = last.watched is watched and whole == last.whole and len(before) == len(now)
        facts = last.facts
        if not (is_same and all(map(is_, before[1:], now[1:]))):
            facts = tuple(value for name, value in _facts(watched) if name not in self._own)
            facts = _ManyFacts(facts) if len(facts) > _MANY else facts
            held = [] if self._has_changed(watched, held, versions) else held
        self._last = _Reading(watched, held, whole, versions, versioned, facts, next(_numbers))
        return self._last

    def _has_changed(self, watched: _Watched, held: list[Any], versions: list[int]) -> bool:
        """Return True if another thread has changed something since it was read."""
        now = [*watched.places.read(), *watched.contents.items()]
        same = len(now) == len(held) and all(map(is_, now, held))
        return not same or watched.places.versions() != versions

    def _of_object(self, x: Any) -> Iterator[Fact]:
        for name, held in attributes(x).items():
            if is_read(x, name, self._names):
                yield (id(x), name), setting(held, _DEEP, self._names)

    def places(self, given: Iterable[torch.Tensor], uses: Callable[[int], bool]) -> Places:
        """Return where tensors are now; ``given`` and ``uses`` as of ``TensorPlaces``."""
        if not (self._watched.is_asked or self._watched.can_change):
            return NO_PLACES
        compared = {*map(id, self._modules.compared())}  # at each call already
        last, tensors = self._last, (x for _, x in self._tensors())
        held = chain(last.held, last.versioned, self.weights, self._modules.tensors(), tensors)
        around = Around(
            lambda: (self._last.number, self._modules.known_change),
            self._tensors,
            self._watched.places.optimizers,
        )
        return TensorPlaces(around, (x for x in held if id(x) not in compared), given, uses)

    def _tensors(self) -> Iterator[tuple[Name, torch.Tensor]]:
        """Yield the tensors in containers, and in attributes of modules, with their names."""
        return chain(self._watched.contents.tensors(), self._modules.tensor_attributes())

    def named(self) -> dict[str, str]:
        """Return the settings in words, by their names."""
        if self._watched is _NOTHING:
            return {}
        facts = (*_facts(self._watched), *_groups(self._watched.places))
        texts = {name: repr(value) for (_, name), value in facts}
        modules = self._modules.known.items()
        return texts | {f"a module's {name}": repr(value) for (_, name), value in modules}

    def after_call(self, leaves: Sequence[Any], before: dict[Any, Any]) -> None:
        """Leave out what the call has changed; ``before``: ``all_facts`` before it."""
        now = self.all_facts(leaves, look_again=True)
        changed = [name for name in before | now if before.get(name) != now.get(name)]
        if changed:
            with self._lock:
                self._own.update(changed)
                self._modules.leave_out(changed)
                self._watch(self._watched.places)
        if len(sys.modules) != self._imported:
            self.find(leaves)  # the call has imported what it reads

    def all_facts(self, leaves: Sequence[Any], *, look_again: bool) -> dict[Any, Any]:
        """Return the settings, to tell which of them a call changes.

        ``look_again``: ask modules again though they report no change: code may hide one.
        """
        watched, modules = self._watched, self._modules
        facts: dict[Any, Any] = {}
        if watched is not _NOTHING:
            groups = _groups(watched.places)
            facts |= chain(_facts(watched), watched.contents.all_facts(), groups)
        for x in filter(has_settings, leaves):
            facts |= dict(self._of_object(x))
        if watched is _NOTHING or not modules.is_needed:
            return facts
        return facts | (modules.look().facts if look_again or modules.changed else modules.known)


def _have_new_containers(known: list[Any], held: list[Any]) -> bool:
    """Return True if ``held`` has containers or arrays that ``known`` does not have."""
    if len(held) != len(known):
        return True
    return any(is_asked(now) for was, now in zip(known, held, strict=True) if now is not was)


def _leaves(found: Iterable[Any]) -> list[torch.Tensor]:
    """Return the leaves among what was found, once each."""
    leaves = (x for x in found if isinstance(x, torch.Tensor) and x.is_leaf)
    return [*{id(x): x for x in leaves}.values()]


def _facts(watched: _Watched) -> Iterator[Fact]:
    return chain(watched.places.facts(), watched.contents.facts())


def _groups(places: SettingPlaces) -> Iterator[Fact]:
    """Yield the settings of optimizers' groups of parameters."""
    for optimizer in places.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for name, option in group.items():
                value = _Those(map(id, option)) if name == "params" else setting(option, _DEEP)
                yield (id(optimizer), f"{name} of group {number}"), value
