"""Whether Triton can compile this package's kernels."""

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Whether this installation has Triton; importing it takes long, so nothing is imported."""
    return find_spec("triton") is not None
