"""A c10d work with a step of ours after it."""

from collections.abc import Callable
from typing import Any, Protocol

from commlib.deadlines import Deadline
from commlib.waits import Interruptible


class Waiter(Protocol):
    """Anything that waits for a work of torch."""

    def wait(self, handle: Any, deadline: Deadline | None = None) -> None:
        """Block until the work has ended."""


class Then(Interruptible):
    """A c10d work with a step of ours after it, which is taken once."""

    def __init__(self, waiter: Waiter, work: Any, step: Callable[[], object]) -> None:
        self._waiter, self.work, self.step = waiter, work, step

    def wait(self, deadline: Deadline | None = None) -> None:
        """Block until the call has ended, and take the step."""
        self._waiter.wait(self.work, deadline)
        step, self.step = self.step, _interrupted
        step()
        self.step = _nothing

    def is_completed(self) -> bool:
        """Return True if the call has ended."""
        return bool(self.work.is_completed())


def _interrupted() -> None:
    raise RuntimeError("a signal interrupted the last step of the call; its result is undefined")


def _nothing() -> None:
    """Take no step: it has been taken."""
