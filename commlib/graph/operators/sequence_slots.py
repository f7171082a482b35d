"""The slot of a class by which C code takes its objects for sequences.

Python fills it for a class that gets a ``__getitem__``, and never empties it. Torch takes tensors
in lists for numbers only as long as a tensor is not a sequence: ``torch.tensor([x.sum()])``.
"""

import ctypes
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_WORD = ctypes.sizeof(ctypes.c_void_p)
_SEQUENCE = 13 * _WORD  # of ``tp_as_sequence`` in a ``PyTypeObject``
_ITEM = 3 * _WORD  # of ``sq_item`` in a ``PySequenceMethods``


@contextmanager
def kept_slots(kinds: Iterable[type]) -> Iterator[None]:
    """Give classes and those that derive from them their slots again, at the end of the block."""
    slots = [_slot(each) for kind in kinds for each in _derived(kind)]
    before = [slot.value for slot in slots]
    try:
        yield
    finally:
        for slot, value in zip(slots, before, strict=True):
            slot.value = value


def _derived(kind: type) -> Iterator[type]:
    derived: list[type] = kind.__subclasses__()
    yield kind
    for each in derived:
        yield from _derived(each)


def _table(kind: type) -> int:
    return ctypes.c_void_p.from_address(id(kind) + _SEQUENCE).value or 0


def _slot(kind: type) -> ctypes.c_void_p:
    return ctypes.c_void_p.from_address(_table(kind) + _ITEM)


def _are_known() -> bool:
    """Return True if slots are where this file expects them; reads nothing outside of a class."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    plain, indexed = type("Plain", (), {}), type("Indexed", (), {"__getitem__": len})
    if not all(0 < _table(each) - id(each) < sys.getsizeof(each) for each in (plain, indexed)):
        return False
    return _slot(plain).value is None and _slot(indexed).value is not None


KNOWN = _are_known()
