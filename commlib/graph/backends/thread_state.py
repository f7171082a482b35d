"""Python objects in torch's thread-local state, which autograd's threads get from their caller."""

import ctypes
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Put = Callable[[str, Any], None]
_PROBE = "commlib probe"


class ThreadState(NamedTuple):
    """Functions for the state of this thread: each object has a key."""

    has: Callable[[str], bool]
    get: Callable[[str], Any]
    put: Put
    remove: Callable[[str], None]


def thread_state(module: Any = torch._C) -> ThreadState | None:
    """Return torch's functions, which are private; None where torch lacks one.

    Torch 2.11 can't remove an object: there None takes its place.
    """
    names = "_is_key_in_tls", "_get_obj_in_tls", "_stash_obj_in_tls"
    has, get, put = (getattr(module, name, None) for name in names)
    if has is None or get is None or put is None:
        return None
    takes = _takes_reference(put)
    put = _with_reference(put) if takes else put
    remove = getattr(module, "_remove_obj_from_tls", None) or (lambda key: put(key, None))
    remove(_PROBE)
    return ThreadState(has, get, put, remove)


def _takes_reference(put: Put) -> bool:
    """Return True if ``put`` keeps the reference of its caller, as in torch 2.11."""
    probe = object()
    before = sys.getrefcount(probe)
    put(_PROBE, probe)
    takes = sys.getrefcount(probe) == before
    if takes:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return takes


def _with_reference(put: Put) -> Put:
    def put_another(key: str, value: Any) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        put(key, value)

    return put_another
