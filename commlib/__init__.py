"""One set of communicators for eager, compiled and captured code, under the old call sites."""

from commlib import errors, flags, ops
from commlib._context import CommContext
from commlib._manager import CommContextManager, comm, init, new_ring, shutdown
from commlib._work import Work

__all__ = [
    "CommContext",
    "CommContextManager",
    "Work",
    "comm",
    "errors",
    "flags",
    "init",
    "new_ring",
    "ops",
    "shutdown",
]
