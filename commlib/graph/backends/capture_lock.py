"""The lock of captures: torch captures one graph at a time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from commlib import flags
from commlib.errors import GraphError


class CaptureLock:
    """Held by a thread that captures, or that runs a function before its capture.

    Another thread waits at most ``FLAGS_comm_timeout_s``: the holder may wait for that thread. The
    function of a first call runs a backward, say, whose nodes are called by a thread of autograd.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Wait for it. Raises ``GraphError`` at the deadline."""
        seconds: float = flags.get(flags.TIMEOUT)
        if not self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise GraphError(
                f"another thread has captured a graph, or run a function before its capture, for "
                f"{seconds:g} s; it may wait for this backward of an earlier captured call: run "
                f"that backward outside of captured functions, or capture one after the other"
            )

    def __exit__(self, *exc: object) -> None:
        """Release it."""
        self._lock.release()

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Hold it inside a ``with`` block unless another thread does; yields whether."""
        held = self._lock.acquire(blocking=False)
        try:
            yield held
        finally:
            if held:
                self._lock.release()
