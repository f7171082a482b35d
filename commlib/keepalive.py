"""Objects that must never be freed, because their destructors would block or abort."""

import ctypes

_kept: list[object] = []
# An extra reference: the interpreter's last collection does not free the list and its contents.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def keep_forever(*objects: object) -> None:
    """Keep ``objects`` alive until the process ends, also while the interpreter shuts down."""
    _kept.extend(objects)
