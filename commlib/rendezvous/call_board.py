"""The calls of each rank of one host in shared memory, written before a launch; nobody waits.

The later one of two neighbours sees at its launch that their calls differ, and launches nothing.
The earlier one sees it while it waits. So no call meets a different one in gloo, which would end
the process or mix their data.
"""

from collections.abc import Callable, Hashable
from typing import Any

_SLOTS = 1024  # calls that a rank may be ahead and still be compared
_KNOWN = 4096  # different calls whose codes are kept
_BITS = 24  # of a word that are the call's code; the others are its number
ROW = 8 * _SLOTS  # bytes per rank


class CallBoard:
    """The last calls of every rank: one word per call, its number and its code.

    A word is written and read as one, so that a reader never takes half of it. Only neighbours are
    compared: where two ranks differ, two neighbours do.
    """

    code_of: Callable[[Any], int]  # of a call, the same in every process

    def __init__(self, memory: Any, start: int, rank: int, size: int) -> None:
        """Use the bytes of ``memory`` from ``start`` on, ``ROW`` per rank."""
        self._codes: dict[Hashable, int] = {}
        view = memoryview(memory)
        part = view[start : start + size * ROW]
        words = part.cast("Q")
        rows = [words[at * _SLOTS : (at + 1) * _SLOTS] for at in range(size)]
        self._views = [*rows, words, part, view]
        self._own, self._number = rows[rank], 0
        near = {(rank - 1) % size, (rank + 1) % size} - {rank}
        self._near = [(at, rows[at]) for at in sorted(near)]

    def post(self, call: Hashable) -> int | None:
        """Write the next call of this rank; return a neighbour whose call differs, or None."""
        self._number = number = self._number + 1
        code = self._codes.get(call)
        if code is None:
            code = self._learn(call)
        place, word = number % _SLOTS, number << _BITS | code
        self._own[place] = word
        for at, row in self._near:
            other = row[place]
            if other != word and other >> _BITS == number:
                return at
        return None

    def _learn(self, call: Hashable) -> int:
        if len(self._codes) > _KNOWN:  # a program whose sizes never repeat
            self._codes.clear()
        code = self._codes[call] = self.code_of(call) & ((1 << _BITS) - 1)
        return code

    def difference(self) -> int | None:
        """Return a neighbour one of whose last calls differs from this rank's, or None."""
        for number in range(max(1, self._number - _SLOTS + 1), self._number + 1):
            place = number % _SLOTS
            for at, row in self._near:
                other = row[place]
                if other != self._own[place] and other >> _BITS == number:
                    return at
        return None

    def close(self) -> None:
        """Release the memory, which can't be unmapped before."""
        self._near = []  # nothing is compared any more
        for view in self._views:
            view.release()
