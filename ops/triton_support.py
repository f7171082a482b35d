"""Detection of Triton, which compiles this package's kernels."""

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Return True if Triton is installed, without the slow import."""
    return find_spec("triton") is not None
