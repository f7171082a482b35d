"""Objects that must never be freed, because their destructors would block or abort."""

import ctypes

_kept: list[object] = []
# An extra reference: the interpreter's last collection leaves the list and its contents alone.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def keep_forever(*objects: object) -> None:
    """Keep ``objects`` alive until the process ends, also while the interpreter is torn down."""
    _kept.extend(objects)
