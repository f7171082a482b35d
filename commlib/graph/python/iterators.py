"""Iterators and queues that a function can reach: which of them a call has taken elements from."""

import io
import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from gc import get_referents
from operator import length_hint
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    GeneratorType,
    MethodType,
    MethodWrapperType,
)
from typing import Any

import numpy as np

from commlib.errors import GraphError
from commlib.graph.python.global_names import Name
from commlib.graph.python.reach import RANDOM, attributes, content, is_of_the_program
from commlib.graph.python.user_names import kind_name

_QUEUES = ("queue", "_queue", "multiprocessing.queues")
_PLAIN = (bool, int, float, str, bytes, type(None))
_SEQUENCES, _CODE = (list, tuple), (type, FunctionType)
_METHODS = (MethodType, BuiltinMethodType, MethodWrapperType)
_HINT = "take the element before the call, and pass it as an argument"
_DEEP = 8  # how far iterators in iterators are followed


def is_queue(x: object) -> bool:
    """Return True for a queue of the standard library."""
    kind: Any = type(x)
    return _is_queue(kind)


@lru_cache(maxsize=10_000)
def _is_queue(kind: Any) -> bool:
    return kind.__module__ in _QUEUES and hasattr(kind, "get")


def is_iterator(x: object) -> bool:
    """Return True for an iterator whose position can't be put back.

    An iterator of the program's own class has its position in attributes. Those are put back.
    """
    kind: Any = type(x)
    return _is_iterator(kind)


@lru_cache(maxsize=10_000)
def _is_iterator(kind: Any) -> bool:
    if not issubclass(kind, Iterator) or issubclass(kind, io.IOBase):
        return False
    return not (is_of_the_program(kind) and isinstance(kind.__next__, FunctionType))


@lru_cache(maxsize=10_000)
def _may_have_one(kind: Any) -> bool:
    """Return True for the types of iterators and queues, and of their methods."""
    return issubclass(kind, _METHODS) or _is_iterator(kind) or _is_queue(kind)


def check_arguments(leaves: Iterable[object]) -> None:
    """Raise ``GraphError`` for an iterator among the arguments of a call."""
    for leaf in leaves:
        if is_iterator(leaf):
            raise _unsupported(
                f"an argument of the function is an iterator ({_kind(leaf)})",
                "pass an element of it, or list(...) for all of them",
            )


def check_taken(names: Sequence[str]) -> None:
    """Raise ``GraphError`` for a call that has taken elements from iterators or queues."""
    if names:
        raise _unsupported(f"the call has taken elements from {', '.join(names[:3])}")


def check_takes(name: str, x: object) -> None:
    """Raise ``GraphError`` for a function whose code takes elements from ``x``."""
    raise _unsupported(f"the function takes elements from {name} ({_kind(x)})")


def check_puts(name: str, x: object) -> None:
    """Raise ``GraphError`` for a function whose code puts elements into ``x``."""
    hint = "return the element, and put it there after the call"
    raise GraphError(
        f"the function puts elements into {name} ({_kind(x)}), but a replay would not; {hint}",
        hint=hint,
    )


def _unsupported(what: str, hint: str = _HINT) -> GraphError:
    return GraphError(
        f"{what}, and each replay would repeat the element of the capture; {hint}", hint=hint
    )


class Positions:
    """The positions of all iterators, queues and generators of numbers that a function can reach.

    Attributes:
        taken: The iterators and queues that have moved.
        draws: Whether a generator of Python or NumPy that the program holds has moved.
    """

    def __init__(self, objects: Sequence[object]) -> None:
        """``objects``: what holds them."""
        sources: dict[int, tuple[str, Any]] = {}
        may_have_one: Callable[[Any], bool] = _may_have_one
        for x in objects:
            for name, one in _held_by(x):
                if not may_have_one(type(one)):
                    continue
                source = one.__self__ if isinstance(one, _METHODS) else one
                if is_iterator(source) or is_queue(source):
                    sources[id(source)] = f"{_name(x, name)} ({_kind(source)})", source
        self._sources = [(name, x, _position(x)) for name, x in sources.values()]
        self._generators = [x for x in objects if isinstance(x, RANDOM)]
        self.taken: list[str] = []
        self.draws = False
        self.begin_draws()

    def begin_draws(self) -> None:
        """Leave out what was drawn so far."""
        self._states = [*map(_state, self._generators)]

    def note_draws(self) -> None:
        """Record whether numbers were drawn."""
        self.draws = self.draws or self._states != [*map(_state, self._generators)]

    def note(self) -> None:
        """Record what has moved."""
        self.note_draws()
        self.taken = [name for name, x, before in self._sources if _has_moved(x, before)]


def _held_by(x: Any) -> Iterable[tuple[Any, Any]]:
    """Return what an object holds, by name."""
    if isinstance(x, dict):
        return list(x.items())
    if isinstance(x, _SEQUENCES):
        return enumerate(x)
    if isinstance(x, CellType):
        return [("a variable of its closure", content(x))]
    if isinstance(x, Name):
        return [(x.name, x.names.get(x.name))]
    return () if isinstance(x, _CODE) else attributes(x).items()


def _name(x: Any, name: Any) -> str:
    if isinstance(x, CellType | Name):
        return str(name)
    kind = _kind(x)
    return (
        f"item {name!r:.40} of a {kind}" if isinstance(x, dict | list | tuple) else f"{kind}.{name}"
    )


def _kind(x: object) -> str:
    return kind_name(x)


def _position(x: Any, depth: int = _DEEP) -> Any:
    """Return what differs before and after an element was taken, as far as Python shows it."""
    if is_queue(x):
        return _size(x)
    if isinstance(x, itertools.count):
        return repr(x)
    frame = x.gi_frame if isinstance(x, GeneratorType) else None  # asked first: it is a referent
    inner = get_referents(x)
    inner += [one for each in inner if type(each) is tuple for one in each]  # of map and zip
    parts: list[Any] = [length_hint(x), _reduced(x)]
    parts += [(name, one) for name, one in attributes(x).items() if isinstance(one, _PLAIN)]
    if isinstance(x, GeneratorType):
        parts += [frame is None or frame.f_lasti, [*map(id, inner)]]
    if depth:
        parts += [_position(one, depth - 1) for one in inner if is_iterator(one)]
    return parts


def _size(x: Any) -> int:
    """Return the number of elements in a queue, as far as it tells: 1 for any number."""
    try:
        return int(x.qsize()) if hasattr(x, "qsize") else int(not x.empty())
    except (NotImplementedError, OSError):  # macOS has no size of a semaphore; a closed pipe
        return 0


def _has_moved(x: Any, before: Any) -> bool:
    """Return True if elements were taken; other threads may add some to a queue meanwhile."""
    now = _position(x)
    return bool(now < before if is_queue(x) else now != before)


def _reduced(x: Any) -> Any:
    """Return the numbers by which an iterator of Python's C code would be pickled."""
    if type(x).__module__ not in ("builtins", "itertools") or isinstance(x, GeneratorType):
        return None
    try:
        with warnings.catch_warnings():  # deprecated for itertools
            warnings.simplefilter("ignore")
            reduced = x.__reduce__()
    except (TypeError, AttributeError):
        return None
    return [one if isinstance(one, _PLAIN) else len(one) for one in _flat(reduced)]


def _flat(x: Any) -> Iterator[Any]:
    for one in x:
        if isinstance(one, tuple):
            yield from _flat(one)
        elif isinstance(one, (*_PLAIN, list, dict)):
            yield one


def _state(x: Any) -> Any:
    if isinstance(x, random.Random):
        return x.getstate()
    if isinstance(x, np.random.RandomState):
        state: Any = x.get_state()
        return state[1].tobytes(), state[2:]
    return repr(x.bit_generator.state)
