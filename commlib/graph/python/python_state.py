"""Python objects as they were before a run of a function, so that the run can be put back."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from commlib.graph.python.changes import Change
from commlib.graph.python.held_objects import CONTAINERS, Empty, held
from commlib.graph.python.held_values import BUFFERS, Buffers, OfTensor
from commlib.graph.python.reach import Reached, reached


def random_state() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's own generators, to be compared."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), name, keys.tobytes(), *rest


class PythonState:
    """Contents of the objects that a function can reach; ``restore()`` restores them.

    The objects stay, and hold the same items and attributes again. Iterators, files, and what a
    library counts inside itself go on from where they are.

    Attributes:
        objects: These objects.
        tensors: Tensors that they hold.
    """

    def __init__(self, roots: Sequence[object]) -> None:
        self._held: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self.objects, self.tensors = reached(roots) if roots else Reached([], [])
        if not roots:
            return
        empty, others = list[Any](), list[Any]()  # most of a module's ten dicts for hooks are empty
        for x in self.objects:
            if type(x) is not tuple:  # it holds the same for ever
                (others if type(x) not in CONTAINERS or x else empty).append(x)
        buffers = [x for x in others if isinstance(x, BUFFERS)]
        self._held = [one for x in others for one in held(x)]
        self._held += [OfTensor(x) for x in self.tensors if x.__dict__]
        self._held.append(Empty(empty, [x for x in self.tensors if not x.__dict__]))
        if buffers:
            self._held.append(Buffers(buffers))
        self._undo = [partial(random.setstate, random.getstate())]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._undo.append(partial(numpy.random.set_state, numpy.random.get_state()))

    def restore(self) -> None:
        """Give every object what it held."""
        for each in self._held:
            each.restore()
        for undo in self._undo:
            undo()

    def changes(self) -> Iterator[Change]:
        """Yield what objects hold now and did not before, or no longer."""
        for each in self._held:
            yield from each.changes()
