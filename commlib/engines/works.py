"""Several works of an engine as one."""

from collections.abc import Sequence
from typing import Any

from commlib.waits import Interruptible, PointToPoint, wait_for


class All(Interruptible):
    """Several works of an engine as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = list(works)
        if all(isinstance(work, PointToPoint) for work in works):  # one helper thread for all
            self._works = [PointToPoint([one for work in works for one in work.works])]

    def wait(self) -> None:
        """Wait for each."""
        for work in self._works:
            wait_for(work)

    def is_completed(self) -> bool:
        """Return True if each has finished."""
        return all(work.is_completed() for work in self._works)
