"""Python's garbage collection, which waits during a run or a capture on a GPU."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_held = threading.local()  # ``by_this``: whether this thread has turned it off


@contextmanager
def no_collection() -> Iterator[None]:
    """Hold garbage collection off inside a ``with`` block.

    It could destroy a graph, which no capture survives; and what the notes of a run allocate would
    start it often, through all objects of the program. One thread at a time calls this.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    before, _held.by_this = getattr(_held, "by_this", False), True
    try:
        yield
    finally:
        _held.by_this = before
        gc.enable()


@contextmanager
def collection() -> Iterator[None]:
    """Let it run in an eager part inside ``no_collection``: the part may wait, or run for long."""
    if not getattr(_held, "by_this", False):
        yield
        return
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
