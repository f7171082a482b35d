"""A kernel of Triton, which needs its own file; imported where there are GPUs."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def add_one(place, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads these
    """Add 1 to ``BLOCK`` numbers in place."""
    i = tl.arange(0, BLOCK)
    tl.store(place + i, tl.load(place + i) + 1)
