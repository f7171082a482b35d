"""A change of what an object of Python holds, and the place of what it holds."""

from collections.abc import Callable
from enum import Enum
from numbers import Number
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch

_PLAIN = (bool, int, float, complex, str, bytes, Number, np.generic)
_VALUES = (*_PLAIN, type(None), torch.dtype, torch.device, Enum, range, type)
_TUPLES = (tuple, torch.Size, frozenset)
GONE = object()  # where there is nothing under a name


class _Unbound:
    def __repr__(self) -> str:
        return "not"


UNBOUND = _Unbound()  # of a name that a replay has left alone


class Place(NamedTuple):
    """A place in an object that holds a value."""

    read: Callable[[], Any]
    bind: Callable[[Any], None]  # gives the object something else in its place


class Change(NamedTuple):
    """Something that an object holds now, and did not before."""

    where: int  # which object
    name: str
    before: Any
    now: Any
    place: Place
    memory: range = range(0)  # where it is, of an array

    @property
    def sets(self) -> bool:
        """Return True for what can be compared, in its own place.

        These are plain values, tensors, and tuples, lists and dicts of such.
        """
        return self.has_place and _can_be_compared(self.now)

    @property
    def has_place(self) -> bool:
        """Return True if something can be bound there."""
        return self.place is not NO_PLACE

    @property
    def is_bound(self) -> bool:
        """Return True if something is there that can be bound again."""
        return self.has_place and self.now is not GONE

    @property
    def is_plain(self) -> bool:
        """Return True for a plain value, or a tuple of such."""
        return is_plain(self.now)

    def undo(self) -> None:
        """Bind the name to what it was bound to; one that was not there to None."""
        self.place.bind(None if self.before is GONE else self.before)

    def again(self) -> "Change":
        """Return what the name is bound to since; to nothing where that is what it was before."""
        now = self.place.read()
        same = now is self.before or (now is None and self.before is GONE)
        return self._replace(now=UNBOUND if same and not self.is_plain else now)

    @property
    def counts(self) -> bool:
        """Return True for a number or text that is another, and for items that have come or gone.

        It is also True for arrays with another content. Other objects may be new at each call and
        mean the same.
        """
        if self.name.startswith(("the length", "the content")):
            return True
        if isinstance(self.now, _PLAIN) and isinstance(self.before, _PLAIN):
            return bool(self.now != self.before)
        return False


def is_plain(x: Any) -> bool:
    """Return True for a value that never changes; also for tuples of such, and the like."""
    if type(x) is slice:
        return all(map(is_plain, (x.start, x.stop, x.step)))
    if type(x) is FunctionType:
        return x.__closure__ is None and is_plain(x.__defaults__)
    return isinstance(x, _VALUES) or (type(x) in _TUPLES and all(map(is_plain, x)))


def _can_be_compared(x: Any) -> bool:
    if type(x) in (tuple, list):
        return all(map(_can_be_compared, x))
    if type(x) is dict:
        return all(map(_can_be_compared, x.values()))
    return is_plain(x) or isinstance(x, torch.Tensor)


NO_PLACE = Place(lambda: None, lambda _: None)  # the items have no names
