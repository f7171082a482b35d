"""The calls of each rank of one host in shared memory, written before a launch; nobody waits.

The later one of two neighbours sees at its launch that their calls differ, and launches nothing.
The earlier one sees it while it waits. So no call meets a different one in gloo, which would end
the process or mix their data.
"""

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

_SLOTS = 1024  # calls that a rank may be ahead and still be compared
_KNOWN = 4096  # different calls whose codes are kept
_BITS = 24  # of a word that are the call's code; the others are its number
ROW = 8 * (_SLOTS + 1)  # bytes per rank: the calls, and a word that only the first row uses


class CallBoard:
    """The last calls of every rank: one word per call, its number and its code.

    A word is written and read as one, so that a reader never takes half of it. Only neighbours are
    compared: where two ranks differ, two neighbours do. They leave a mark for all other ranks.
    """

    code_of: Callable[[Any], int]  # of a call, the same in every process

    def __init__(self, memory: Any, start: int, rank: int, size: int) -> None:
        """Use the bytes of ``memory`` from ``start`` on, ``ROW`` per rank."""
        self._codes: dict[Hashable, int] = {}
        view = memoryview(memory)
        part = view[start : start + size * ROW]
        words = part.cast("Q")
        rows = [words[at * (_SLOTS + 1) : at * (_SLOTS + 1) + _SLOTS] for at in range(size)]
        mark = words[_SLOTS : _SLOTS + 1]
        self._views = [*rows, mark, words, part, view]
        self._own: Any = rows[rank]
        self._mark: Any = mark  # 0, or the two members whose calls differ
        self._number = 0
        near = {(rank - 1) % size, (rank + 1) % size} - {rank}
        self._near = [(at, rows[at]) for at in sorted(near)]
        self._equal = dict.fromkeys(near, 0)  # the last call that a neighbour has made alike

    def post(self, call: Hashable) -> int | None:
        """Write the next call of this rank.

        Returns:
            A neighbour whose call differs, or a member that has marked the board; else None.
        """
        self._number = number = self._number + 1
        code = self._codes.get(call)
        if code is None:
            code = self._learn(call)
        slot, word = number % _SLOTS, number << _BITS | code
        try:
            self._own[slot] = word
            for at, row in self._near:
                other = row[slot]
                if other != word and other >> _BITS == number:
                    return at
            return None if self._mark[0] == 0 else self._mark[0] >> 32
        except ValueError:  # another thread has closed the board meanwhile
            return None

    def _learn(self, call: Hashable) -> int:
        if len(self._codes) > _KNOWN:  # a program whose sizes never repeat
            self._codes.clear()
        code = self._codes[call] = self.code_of(call) & ((1 << _BITS) - 1)
        return code

    def difference(self) -> int | None:
        """Return a neighbour one of whose last calls differs from this rank's, or None."""
        try:
            return next((at for at, row in self._near if self._differs(at, row)), None)
        except ValueError:  # another thread has closed the board meanwhile
            return None

    def _differs(self, at: int, row: Any) -> bool:
        """Compare the calls that both have posted since the last look."""
        last = self._number
        for number in range(max(self._equal[at], last - _SLOTS) + 1, last + 1):
            slot = number % _SLOTS
            word = self._own[slot]  # read once: another thread may post meanwhile
            other = row[slot]
            if word >> _BITS < number or other >> _BITS < number:
                return False  # not posted yet
            if word >> _BITS == number == other >> _BITS and word != other:
                return True
            self._equal[at] = number
        return False

    def mark(self, one: int, other: int) -> None:
        """Tell every member that the calls of two members differ."""
        with suppress(ValueError):  # another thread has closed the board meanwhile
            self._mark[0] = one << 32 | other + 1

    def marked(self) -> tuple[int, int] | None:
        """Return the two members whose calls differ, as the first of them has marked; or None."""
        try:
            word = self._mark[0]
        except ValueError:  # another thread has closed the board meanwhile
            return None
        return (word >> 32, (word & 0xFFFFFFFF) - 1) if word else None

    def close(self) -> None:
        """Release the memory, which can't be unmapped before; later calls are not compared."""
        self._near = []
        self._own, self._mark = [0] * _SLOTS, [0]
        for view in self._views:
            view.release()
