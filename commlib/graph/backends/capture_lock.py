"""The lock of captures: torch captures one graph at a time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from commlib import flags
from commlib.errors import GraphError
from commlib.graph.backends.thread_state import thread_state

_state = thread_state()


class _Hold:
    """One entrance of a thread.

    Attributes:
        inner: The lock of the threads that work for the one that has entered, and of all further
            entrances of that one.
        outer: The entrance that this one is inside of.
        ended: Whether the thread has left.
    """

    __slots__ = ("ended", "inner", "outer")

    def __init__(self, outer: "_Hold | None") -> None:
        self.inner, self.outer, self.ended = threading.RLock(), outer, False


class _Thread(threading.local):
    """State of one thread: its holds, the innermost last, and what it carried before each."""

    def __init__(self) -> None:
        self.holds: list[_Hold] = []
        self.carried: list[_Hold | None] = []


class CaptureLock:
    """Held by a thread that captures, or that runs a function before its capture.

    That function may run a backward, whose nodes are called by threads of autograd. The holder
    waits for these, so that they enter without it: one at a time, and before the holder leaves.
    Autograd gives them the thread-local state of the caller, and that names the hold. Another
    thread waits at most ``FLAGS_comm_timeout_s``: the holder may wait for that thread too.
    """

    def __init__(self) -> None:
        self._free = _Hold(None)  # never ends: its inner lock is for threads that work for nobody
        self._thread = _Thread()
        self._key = f"commlib capture lock {id(self)}"

    def __enter__(self) -> None:
        """Wait for it. Raises ``GraphError`` at the deadline."""
        seconds: float = flags.get(flags.TIMEOUT)
        outer = self._entered(min(seconds, threading.TIMEOUT_MAX))
        if outer is None:
            raise GraphError(
                f"another thread has captured a graph, or run a function before its capture, for "
                f"{seconds:g} s; if that function waits for this thread, make this call outside of "
                f"the function"
            )
        hold, thread = _Hold(outer), self._thread
        thread.holds.append(hold)
        thread.carried.append(self._carried())
        self._carry(hold)

    def __exit__(self, *exc: object) -> None:
        """Release it, after those that work for this thread: an error does not wait for them."""
        thread = self._thread
        self._carry(thread.carried.pop())
        hold = thread.holds.pop()
        with hold.inner:
            hold.ended = True
        assert hold.outer is not None
        hold.outer.inner.release()

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Hold it inside a ``with`` block unless another thread does; yields whether.

        A thread that works for the holder does not get it: a capture may be under way.
        """
        holds = self._thread.holds
        inner = (holds[-1] if holds else self._free).inner
        held = inner.acquire(blocking=False)
        try:
            yield held
        finally:
            if held:
                inner.release()

    def _entered(self, seconds: float) -> _Hold | None:
        """Enter the innermost hold that this thread is inside of; None at the deadline."""
        while True:
            hold = self._innermost()
            if not hold.inner.acquire(timeout=seconds):
                return None
            if not hold.ended:
                return hold
            hold.inner.release()  # it has ended meanwhile

    def _innermost(self) -> _Hold:
        """Return this thread's own hold, else that of the thread that it works for, if any.

        The state of a backward may name a hold that has ended.
        """
        holds = self._thread.holds
        hold = holds[-1] if holds else self._carried()
        while hold is not None and hold.ended:
            hold = hold.outer
        return hold or self._free

    def _carried(self) -> _Hold | None:
        """Return the hold that this thread's state names."""
        if _state is None or not _state.has(self._key):
            return None
        hold: _Hold | None = _state.get(self._key)
        return hold

    def _carry(self, hold: _Hold | None) -> None:
        """Name a hold in this thread's state; None removes the name.

        A Python object that is left in the state of a thread blocks the end of that thread.
        """
        if _state is None:
            return
        if hold is not None:
            _state.put(self._key, hold)
        elif _state.has(self._key):
            _state.remove(self._key)
