"""Objects that a function returns or binds: those of the program, and those that each call makes.

The program's objects are the same ones at each replay. Of the others, each replay gives a copy.
"""

import copy
import gc
from array import array
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, ValuesView
from dataclasses import dataclass, field
from io import IOBase
from itertools import islice
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch

from commlib.core.tensors import parts
from commlib.errors import GraphError
from commlib.graph.python.changes import is_plain
from commlib.graph.python.python_state import PythonState
from commlib.graph.python.reach import is_of_the_program
from commlib.graph.python.user_names import kind_name

_MOST = 100_000  # objects that are looked through
_MOST_IN_LEAF = 1000  # for tensors of the graph
_OF_LIBRARIES = (np.ndarray, array)
_FIXED = (  # which show what others hold, or are never copied
    *(type, FunctionType, ModuleType, MappingProxyType, memoryview),
    *(KeysView, ValuesView, ItemsView),
)


@dataclass
class Lasting:
    """The objects that were there before a capture, and that all calls share.

    Attributes:
        before: The result of the call before the capture and the state that it has left.
        there: What these hold, once it was asked for; both are empty after the capture.
    """

    before: tuple[Any, PythonState] | None = None
    there: set[int] = field(default_factory=set)
    _known: dict[int, Any] = field(default_factory=dict)  # also for later captures

    def __contains__(self, x: object) -> bool:
        """Return True for an object that was there, or a view of an array that was."""
        if self.before is not None:
            result, state = self.before
            held = (*inside(result), *state.objects, *state.tensors)
            self.before, self.there = None, set(map(id, held))
        if id(x) in self.there:
            self._known[id(x)] = x
        return id(x) in self._known or (
            isinstance(x, np.ndarray) and x.base is not None and x.base in self
        )

    def misses(self, x: object) -> bool:
        """Return True for an object with a content that each call makes."""
        made = isinstance(x, _OF_LIBRARIES) or is_of_the_program(type(x))
        return made and not is_plain(x) and not isinstance(x, _FIXED) and x not in self


class MadeObjects:
    """Objects that a call has made: each replay gives other ones.

    Tensors in them and objects of the program stay.
    """

    def __init__(self, objects: Sequence[Any], lasting: Lasting) -> None:
        """Raises ``GraphError`` for objects that can't be copied."""
        held = inside(objects)
        self._stay = {id(x): x for x in held if isinstance(x, torch.Tensor) or x in lasting}
        self._kept = objects
        try:
            self._kept = self.again()
        except Exception as error:
            names = ", ".join(map(kind_name, objects))
            raise GraphError(
                f"the function returns or binds what each call makes ({names}), and it can't be "
                f"copied for a replay ({type(error).__name__}: {error}); return what it holds"
            ) from error

    def again(self) -> Sequence[Any]:
        """Return them for a replay."""
        return copy.deepcopy(self._kept, {**self._stay})


def can_be_copied(x: object, lasting: Lasting) -> bool:
    """Return True if replays can give copies of an object."""
    try:
        MadeObjects([x], lasting)
    except GraphError:
        return False
    return True


def inside(root: Any) -> Iterator[Any]:
    """Yield an object and all that it leads to, but for classes and modules of Python."""
    queue, seen = deque([root]), set[int]()
    while queue and len(seen) < _MOST:
        obj = queue.popleft()
        if id(obj) in seen or isinstance(obj, type | ModuleType):
            continue
        seen.add(id(obj))
        yield obj
        if isinstance(obj, torch.Tensor):
            queue.extend(parts(obj))
        elif isinstance(obj, FunctionType):
            queue.extend((obj.__closure__, obj.__defaults__))
        elif isinstance(obj, np.ndarray):
            queue.append(obj.base)
        else:
            queue.extend(gc.get_referents(obj))


def hides(leaf: Any, own: Callable[[torch.Tensor], bool]) -> bool:
    """Return True if a non-tensor object holds a tensor of the graph, or an unfinished run."""
    if isinstance(leaf, Iterator) and not isinstance(leaf, IOBase):
        return True
    held = islice(inside(leaf), _MOST_IN_LEAF)
    return any(isinstance(x, torch.Tensor) and own(x) for x in held)
