"""Contents of containers: plain ones are compared as bytes, others item by item."""

import marshal
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Hashable, Iterable, Iterator
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from commlib.graph.python.setting import PLAIN, label, setting

_VERSION = 2  # The version of marshal: later ones write what has nothing to do with values.
_MOST_BYTES = 2000  # The limit for one object.
_ALL_BYTES = 20_000  # The limit for all of them, as they are estimated.
MOST_WRITTEN = 100_000  # Bytes that represent all of them: what is written for text is longer.
_NUMBERS = (bool, int, float, complex, type(None))
_MOST_ITEMS = 200  # of one container with other objects than plain values
_ALL_ITEMS = 2000  # of all such containers
_DEEP = 6  # containers in each other
_DICTS = (dict, OrderedDict, defaultdict, MappingProxyType)
_OPENED = (*_DICTS, list, tuple, set, deque)
_ARRAYS = (np.ndarray, array, bytearray)

Fact = tuple[tuple[int, str], Any]  # whose it is, its name, and what it is


class Place(NamedTuple):
    """A name that leads to something.

    Attributes:
        where: Whose it is.
        name: The name.
        held: What it leads to.
    """

    where: int
    name: str
    held: Any


class Contents:
    """Containers whose content is asked at every call.

    ``whole`` takes 0.1 µs and 20 ns per value, for all containers of plain values together. Arrays
    count by their bytes, dtype and shape. Other containers are opened: their items are
    compared by identity, at 20 ns each, and containers among them have places too. Of tensors among
    items, only the presence counts in a key, and ``tensors`` yields them. Arrays and containers
    of more than 200 items are left out where they don't fit into 2,000 bytes. What is beyond 20,000
    bytes in all is left out too, and so are opened containers beyond 2,000 items.

    Attributes:
        has_plain: Whether there are containers of plain values other than arrays.
        is_empty: Whether nothing is asked.
    """

    def __init__(
        self,
        places: Iterable[Place] = (),
        own: Container[Any] = (),
        kept: dict[Any, list[Any]] | None = None,
    ) -> None:
        """Look into containers.

        Args:
            places: Containers and other objects.
            own: Names of facts that calls of the function change. Containers that it changes are
                opened: their other items count.
            kept: The keys that count in containers to which calls of the function add items. They
                are those of the first look, which adds them.
        """
        self._plain: list[Place] = []
        self._opened: list[tuple[Place, list[Any] | None]] = []
        self._own, self._kept = own, {} if kept is None else kept
        self._room, self._bytes = _ALL_ITEMS, _ALL_BYTES
        seen = set[tuple[int, str]]()
        for slot in places:
            self._add(slot, seen, _DEEP)
        plain = [slot.held for slot in self._plain]
        self._arrays = [x for x in plain if type(x) in _ARRAYS]
        self._held = [x for x in plain if type(x) not in _ARRAYS]
        opened = [slot.held for slot, _ in self._opened]
        self._dicts = [x for x in opened if type(x) in _DICTS]
        self._lists = [x for x in opened if type(x) not in _DICTS and not isinstance(x, tuple)]
        self.has_plain = bool(self._held)
        self.is_empty = not (self._plain or self._opened)

    def _add(self, place: Place, seen: set[tuple[int, str]], depth: int) -> None:
        x, name = place.held, (place.where, _content(place.name))
        if not _may_change(x) or name in seen or not depth:
            return
        seen.add(name)
        size = 0 if name in self._own else _plain_size(x)
        if 0 < size <= self._bytes:
            self._bytes -= size
            self._plain.append(place)
        elif _is_opened(x) and len(x) <= self._room:
            self._room -= len(x)
            keys, items = None, (place.where, _keys(place.name))
            if items in self._own:
                keys = self._kept.setdefault(items, [key for key, _ in _items(x)])
            self._opened.append((place, keys))
            for key, one in _items(x, keys):
                self._add(Place(place.where, _item(place, key), one), seen, depth - 1)

    @property
    def whole(self) -> bytes:
        """Return bytes that are others where a container of plain values holds other ones.

        They are empty where one holds something else now, which hides the others.
        """
        data = _bytes_of(self._held) if self._held else b""
        if self._arrays and (data or not self._held):
            data += b"".join(map(_bytes_of_array, self._arrays))
        return data

    def items(self) -> list[Any]:
        """Return the keys and items of the other containers."""
        items: list[Any] = []
        for x in self._dicts:
            items += x
            items += x.values()
        for x in self._lists:
            items += x
        return items

    def facts(self) -> Iterator[Fact]:
        """Yield what each of them holds."""
        for owner_id, name, held in self._plain:
            yield (owner_id, _content(name)), _fact_of(held)
        for slot, keys in self._opened:
            yield from _facts(slot, keys)

    def tensors(self) -> Iterator[tuple[tuple[Hashable, ...], torch.Tensor]]:
        """Yield the tensors among their items, with the places of these; no code of keys runs."""
        for slot, keys in self._opened:
            for key, one in _items(slot.held, keys):
                if isinstance(one, torch.Tensor):
                    yield (*slot[:2], key if type(key) in PLAIN else id(key)), one

    def all_facts(self) -> Iterator[Fact]:
        """Yield what each of them holds, and each item."""
        yield from self.facts()
        for slot in self._plain:
            if _is_opened(slot.held):
                yield from _facts(slot)


def is_asked(x: Any) -> bool:
    """Return True for a container that counts by its content."""
    return _may_change(x) and (_plain_size(x) > 0 or _is_opened(x))


def _may_change(x: Any) -> bool:
    """Return True for containers, but not for a tuple of plain values, which is a value itself."""
    kind: Any = type(x)
    if not (_opens(kind) or kind in _ARRAYS):
        return False
    return not (isinstance(x, tuple) and all(isinstance(one, PLAIN) for one in x))


def _facts(place: Place, keys: list[Any] | None = None) -> Iterator[Fact]:
    """Yield the items of a container, with their number or keys; of ``keys`` alone if given."""
    items, kind = _items(place.held), type(place.held)
    yield (place.where, _keys(place.name)), _shape(kind, items)
    for key, one in items if keys is None else _items(place.held, keys):
        yield (place.where, _item(place, key)), _of_item(one)


def _shape(kind: type, items: list[tuple[Any, Any]]) -> Any:
    """Return what tells the items of containers of a kind apart, but for the items themselves."""
    if kind is set:
        return kind, frozenset(setting(key) for key, _ in items)
    has_keys = kind in _DICTS
    return kind, setting(tuple(key for key, _ in items) if has_keys else len(items))


def _of_item(x: Any) -> Any:
    """Return what tells an item from another: a container among them has its own place."""
    return type(x) if isinstance(x, torch.Tensor) or is_asked(x) else setting(x)


def _items(x: Any, keys: list[Any] | None = None) -> list[tuple[Any, Any]]:
    """Return the items of a container with their keys; those of ``keys`` that are there."""
    if type(x) in _DICTS:
        return list(x.items() if keys is None else ((key, x[key]) for key in keys if key in x))
    if isinstance(x, set):
        return [(one, one) for one in (list(x) if keys is None else keys) if one in x]
    return list(enumerate(x))[: None if keys is None else len(keys)]


def _keys(name: str) -> str:
    return f"the items of {name}"


def _content(name: str) -> str:
    return f"the content of {name}"


def _item(place: Place, key: Any) -> str:
    return f"{place.name}[{label(key)}]"


def _is_opened(x: Any) -> bool:
    kind: Any = type(x)
    return _opens(kind) and len(x) <= _MOST_ITEMS


@lru_cache(maxsize=10_000)
def _opens(kind: type) -> bool:
    """Return True for classes of containers, and for those of named tuples."""
    return kind in _OPENED or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _plain_size(x: Any) -> int:
    """Return about how many bytes represent an array or a container of plain values; 0 for others.

    It is 0 beyond ``_MOST_BYTES`` too. No more than these are looked at, however much ``x`` holds.
    Only values of the built-in types themselves are plain: of others, ``marshal`` writes a part.
    """
    if type(x) in _ARRAYS:
        written = x.nbytes if type(x) is np.ndarray else len(x) * getattr(x, "itemsize", 1)
        size = len(_bytes_of_array(x)) if written <= _MOST_BYTES else 0
        return size if size <= _MOST_BYTES else 0
    left, size = [x], 0
    while left:
        one = left.pop()
        kind = type(one)
        if kind in _NUMBERS:
            size += 9 if kind is not int else 5 + one.bit_length() // 7
        elif kind in (str, bytes):
            size += 5 + len(one)
        elif kind in (list, tuple, set, frozenset, dict) and len(one) <= _MOST_BYTES:
            size += 5
            left += one
            left += one.values() if kind is dict else ()
        else:
            return 0
        if size > _MOST_BYTES:
            return 0
    return size


def _bytes_of_array(x: Any) -> bytes:
    if type(x) is np.ndarray:
        return b"".join((repr((x.dtype, x.shape)).encode(), x.tobytes()))
    return b"".join((repr((type(x), len(x), getattr(x, "typecode", None))).encode(), bytes(x)))


def _fact_of(x: Any) -> Any:
    """Return what tells a plain container or an array from another; sets have no order."""
    if type(x) is set:
        return set, frozenset(map(setting, list(x)))  # a list: other threads may add to the set
    return _bytes_of_array(x) if type(x) in _ARRAYS else _bytes_of(x)


def _bytes_of(x: Any) -> bytes:
    """Return bytes that differ where values or their types differ; empty ones for other objects."""
    try:
        return marshal.dumps(x, _VERSION)
    except ValueError:
        return b""
