"""Ids of rings that the program does not number itself: no two rings of a job have the same."""

import threading

# The program's own ids stay below, those of process groups begin at 1 << 20.
FIRST_ID = 1 << 19


class RingNumbers:
    """The numbers that this process has drawn for new rings."""

    def __init__(self) -> None:
        self._drawn = 0
        self._lock = threading.Lock()

    def draw(self) -> int:
        """Return a number that this process has never drawn before."""
        with self._lock:
            self._drawn += 1
            return self._drawn - 1


def ring_id(number: int, rank: int, world_size: int) -> int:
    """Return the id of the ring for which ``rank`` has drawn ``number``; no other has the same."""
    return FIRST_ID + number * world_size + rank


numbers = RingNumbers()
