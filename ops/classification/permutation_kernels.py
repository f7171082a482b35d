"""The keyed permutation of ``permutation`` for Triton kernels: the same numbers."""

# Triton ships no types, and its kernels are not Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from commlib.ops.classification import permutation

HALF = tl.constexpr(permutation.HALF)
STEP, FACTOR = tl.constexpr(permutation.STEP), tl.constexpr(permutation.FACTOR)
ROUNDS = tl.constexpr(permutation.ROUNDS)


@triton.jit
def mixed(x):
    """Mix the bits of 32-bit words."""
    x = (((x >> 16) ^ x) * FACTOR) & HALF
    x = (((x >> 16) ^ x) * FACTOR) & HALF
    return (x >> 16) ^ x


@triton.jit
def _key(seed, number):
    low = (seed & HALF) + tl.cast(number, tl.int64) * STEP
    return mixed(mixed(low & HALF) ^ (seed >> 32)).to(tl.uint32)


@triton.jit
def _moved(x, other, key, side):
    """Compute one half of a round in 32 bits, as ``permutation`` does in 64."""
    h = other + key
    h = ((h >> 16) ^ h) * FACTOR
    h = ((h >> 16) ^ h) * FACTOR
    moved = x + tl.umulhi((h >> 16) ^ h, side + x * 0)
    return tl.where(moved >= side, moved - side, moved)


@triton.jit
def _image(x, seed, a, b):
    right = x // a
    left = x - right * a
    for number in range(0, ROUNDS, 2):
        left = _moved(left, right, _key(seed, number), a)
        right = _moved(right, left, _key(seed, number + 1), b)
    return left + right * a


@triton.jit
def permuted(x, live, seed, size):
    """Return the image of each ``x`` below ``size`` where ``live``."""
    wanted = tl.maximum(size, 1)
    a = tl.sqrt(wanted.to(tl.float64)).to(tl.int64)
    a = tl.where(a * a < wanted, a + 1, a)
    a = tl.where((a - 1) * (a - 1) >= wanted, a - 1, a)
    b = ((wanted + a - 1) // a).to(tl.uint32)
    a = a.to(tl.uint32)
    size = size.to(tl.uint32)
    x = _image(tl.where(live, x, 0).to(tl.uint32), seed, a, b)
    outside = live & (x >= size)
    while tl.max(outside.to(tl.int32), 0) > 0:
        x = tl.where(outside, _image(x, seed, a, b), x)
        outside = live & (x >= size)
    return x.to(tl.int64)
