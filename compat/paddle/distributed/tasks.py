"""The handle that legacy collectives return."""

from collections.abc import Callable
from typing import Any

from commlib.core.work import Work


class Task:
    """A call that is under way or done."""

    def __init__(self, done: Any, finish: Callable[[], None] | None = None) -> None:
        """Take what a ring's collective has returned.

        Args:
            done: A ``Work``, or anything else for a call whose result is there.
            finish: Brings the result to the caller's tensors; called once, after the call.
        """
        self._work: Work | None = done if isinstance(done, Work) else None
        self._synchronous, self._finish = self._work is None, finish
        if self._work is None:
            self._end()

    def wait(self, timeout: object = None) -> bool:
        """Make the result safe to use: the current stream waits on a GPU, the host on a CPU.

        Args:
            timeout: Ignored: the ring's timeout holds.

        Returns:
            True.

        Raises:
            CommTimeout, EngineError: On a CPU: the call has failed.
        """
        if self._work is not None:
            self._work.wait()
            self._end()
        return True

    def synchronize(self) -> None:
        """Wait, as ``wait`` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if the call has finished; never blocks.

        gloo reports a receive only to a thread that waits for it: False until then.
        """
        if self._work is not None and self._work.done():
            self.wait()
        return self._work is None

    def is_sync(self) -> bool:
        """Return True for a call with ``sync_op=True``."""
        return self._synchronous

    def _end(self) -> None:
        finish, self._finish, self._work = self._finish, None, None
        if finish is not None:
            finish()
