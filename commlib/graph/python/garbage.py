"""Python's collection of garbage, held off while graphs are made."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_held = 0  # blocks under way, in all threads
_enabled = False  # whether Python collected garbage before the first of them


@contextmanager
def no_collection() -> Iterator[None]:
    """Hold automatic collections off inside a ``with`` block, in all threads.

    One could destroy a graph, which no capture survives. A first call makes so many objects that
    Python would search all others for garbage.
    """
    global _held, _enabled
    with _lock:
        if _held == 0:
            _enabled = gc.isenabled()
            gc.disable()
        _held += 1
    try:
        yield
    finally:
        with _lock:
            _held -= 1
            if _held == 0 and _enabled:
                gc.enable()


def _release() -> None:
    """Forget the blocks of the parent's threads, which a forked child does not have."""
    global _lock, _held
    _lock = threading.Lock()
    if _held and _enabled:
        gc.enable()
    _held = 0


os.register_at_fork(after_in_child=_release)
