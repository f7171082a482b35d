"""Ids of rings that the program does not number itself: blocks that all members reserve alike."""

import random
import threading
import time
from collections.abc import Callable, Sequence

# The program's own ids stay below, those of process groups begin at 1 << 20.
FIRST_ID = 1 << 19
_PAUSE_S, _LONGEST_PAUSE_S = 1e-3, 0.1  # before another round

Exchange = Callable[[Sequence[int]], list[list[int]]]


class RingIds:
    """The ids that this process has not reserved yet."""

    def __init__(self) -> None:
        self._next = FIRST_ID
        self._lock = threading.Lock()

    def agree(self, count: int, exchange: Exchange, taken: Callable[[int], bool]) -> int:
        """Reserve ``count`` ids in a row on all members of a ring; every member calls it.

        Members may have made other rings in other threads meanwhile, so the rounds are repeated
        until all of them have reserved the same block.

        Args:
            count: The same on every member.
            exchange: Returns every member's integers.
            taken: Returns True for an id that is in use on this rank.

        Returns:
            The first id.
        """
        mine, pause = self._reserve(count, FIRST_ID, taken), _PAUSE_S
        while True:
            blocks = [block for [block] in exchange([mine])]
            if min(blocks) == max(blocks):
                return mine
            if mine < max(blocks):
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                time.sleep(random.uniform(0, pause))  # else two rings may overtake for ever
                mine = self._reserve(count, max(blocks), taken)

    def _reserve(self, count: int, at_least: int, taken: Callable[[int], bool]) -> int:
        with self._lock:
            first = max(self._next, at_least)
            while any(taken(first + number) for number in range(count)):
                first += 1
            self._next = first + count
            return first


ring_ids = RingIds()
