"""Detection of Triton, which compiles this package's kernels."""

from importlib.util import find_spec

_FOUND = find_spec("triton") is not None


def has_triton() -> bool:
    """Return True if Triton is installed, without the slow import; compiled code may call it."""
    return _FOUND
