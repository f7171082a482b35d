"""Waits for calls of a process group on a CPU, in which Python handles signals."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from commlib.deadlines import Deadline
from commlib.waits import OVER, Interruptible

# While torch waits, Python runs no signal handler, so a wait is cut into slices of this length.
Look = Callable[[], None] | None
_SLICE = timedelta(seconds=0.1)
_SLICE_OVER = "Operation timed out"  # in torch's error when a slice ends


class Then(Interruptible):
    """A c10d work with a step of ours after it, which is taken once."""

    def __init__(self, work: Any, step: Callable[[], object], look: Look = None) -> None:
        self.work, self.step, self._look = work, step, look

    def wait(self, deadline: Deadline | None = None) -> None:
        """Block until the call has ended, and take the step."""
        wait(self.work, deadline, self._look)
        step, self.step = self.step, _interrupted
        step()
        self.step = _nothing

    def is_completed(self) -> bool:
        """Return True if the call has ended."""
        return bool(self.work.is_completed())


def wait(handle: Any, deadline: Deadline | None = None, look: Look = None) -> None:
    """Block until a work of torch or an ``Interruptible`` has finished.

    ``look`` is called after each slice, and may raise.
    """
    if isinstance(handle, Interruptible):
        handle.wait(deadline)
        return
    while not handle.is_completed():
        if deadline is not None and deadline.passed():
            raise RuntimeError(OVER)
        try:
            handle.wait(_SLICE if deadline is None else min(_SLICE, deadline.timedelta()))
        except RuntimeError as error:
            if look is not None:  # also after a failure: it may be that of the other rank
                look()
            if _SLICE_OVER not in str(error):
                raise
        else:
            return
    handle.wait()


def _interrupted() -> None:
    raise RuntimeError("a signal interrupted the last step of the call; its result is undefined")


def _nothing() -> None:
    """Take no step: it has been taken."""
