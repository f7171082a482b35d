"""Memory that torch keeps for streams of a captured function's runs, given back to the GPU."""

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.autograd import Variable

from commlib.deadlines import Deadline
from commlib.graph.backends.capture_lock import CaptureLock
from commlib.streams import capturing

_FREED_S = 1.0  # until a thread of autograd has freed what it holds, at the exit
_callbacks = set[ref[Any]]()  # those that a thread of autograd holds


@contextmanager
def trimmed(device: torch.device, lock: CaptureLock) -> Iterator[None]:
    """Give back what torch has taken inside: no graph, and often no stream, could use it."""
    before = torch.cuda.memory_reserved(device)
    try:
        yield
    finally:
        if torch.cuda.memory_reserved(device) > before:
            _give_back(lock)


def trim_after_backward(outs: Sequence[torch.Tensor], lock: CaptureLock) -> None:
    """Give back what torch keeps, once, when the first backward from some of ``outs`` has ended.

    Their nodes belong to a side stream, where later backwards allocate gradients alone.
    """
    handles: list[Any] = []

    def begin(_: object) -> None:
        if handles:
            for handle in handles:
                handle.remove()
            handles.clear()
            callback, engine = partial(_give_back, lock), Variable._execution_engine
            _callbacks.add(ref(callback, _callbacks.discard))  # in C: no other thread runs within
            engine.queue_callback(callback)

    nodes = {out.grad_fn for out in outs}
    handles += [node.register_prehook(begin) for node in nodes if node is not None]


def _give_back(lock: CaptureLock) -> None:
    """Give it back, unless another thread holds the lock: it may wait for this backward."""
    if not capturing():
        with lock.if_free() as held:
            if held:
                torch.cuda.empty_cache()


@atexit.register
def _await_freed_callbacks() -> None:
    """Wait until autograd's threads have freed the callbacks of backwards.

    A thread needs the interpreter for that, and aborts the process where that has ended.
    """
    Deadline(_FREED_S).poll(lambda: not _callbacks)


os.register_at_fork(after_in_child=_callbacks.clear)  # a child does not have its parent's threads
