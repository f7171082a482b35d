"""Functions of torch that are exchanged while a run is watched, so that it sees what they do.

Torch would take other ways under a mode for functions. So the functions themselves are exchanged.
A thread that is not watched runs the old ones.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from commlib.graph.operators.sequence_slots import kept_slots

Place = tuple[Any, str]  # a class or module, and a name in it
_lock = threading.Lock()


class Exchange:
    """Functions that are exchanged as long as at least one thread asks for it."""

    def __init__(
        self, places: Sequence[Place], watched: Callable[[str, Callable[..., Any]], Any]
    ) -> None:
        """``watched``: returns what takes the place of a function, by its name."""
        self._places, self._watched = places, watched
        self._inherited = [slot for slot in places if slot[1] not in vars(slot[0])]
        self._indexed = [owner for owner, name in places if name == "__getitem__"]
        self._before: list[Any] = []
        # What takes over, by place, with the function that it takes over from.
        self._made: dict[Place, tuple[Any, Any]] = {}
        self._asking = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Exchange them inside a ``with`` block."""
        with _lock:
            self._asking += 1
            if self._asking == 1:
                self._before = [getattr(owner, name) for owner, name in self._places]
                with kept_slots(self._indexed) if self._indexed else nullcontext():
                    for slot, function in zip(self._places, self._before, strict=True):
                        made = self._made.get(slot)
                        if made is None or made[0] is not function:  # the program's own exchange
                            made = self._made[slot] = function, self._watched(slot[1], function)
                        setattr(*slot, made[1])
        try:
            yield
        finally:
            with _lock:
                self._asking -= 1
                over = () if self._asking else zip(self._places, self._before, strict=True)
                with kept_slots(self._indexed) if self._indexed else nullcontext():
                    for slot, function in over:
                        if slot in self._inherited:
                            delattr(*slot)
                        else:
                            setattr(*slot, function)
