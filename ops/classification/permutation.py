"""A keyed pseudo-random permutation of range(size), evaluated only at requested indices.

A generalised Feistel network: numbers are pairs of Z_a x Z_b with a * b just above ``size``.
Each round moves one half by a keyed function of the other. An image beyond ``size`` is mapped
again until it is below (Black and Rogaway, "Ciphers with arbitrary finite domains"). Integers of 64
bits only, so that torch operators and Triton kernels give the same numbers.
"""

import math

import torch

ROUNDS = 16  # even; sizes 5 and 6 are the hardest: with 8 a chi-square over 20,000 seeds fails
HALF = 2**32 - 1
STEP, FACTOR = 0x9E3779B9, 0x45D9F3B  # of the keys (golden ratio), and of the mixer: below 2**27
LARGEST = 2**31 - 1  # of ``size``


def permuted(seed: int, count: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the images of 0 to ``count`` - 1, int64 [count]; on a GPU this waits for it.

    ``seed``: 0 to 2**63 - 1; ``count`` <= ``size``.
    """
    a = math.isqrt(max(size, 1) - 1) + 1
    sides = a, -(-size // a)
    keys = [key(seed, number) for number in range(ROUNDS)]
    x = _image(torch.arange(count, device=device), keys, *sides)
    outside = (x >= size).nonzero()[:, 0]
    while len(outside):
        again = _image(x[outside], keys, *sides)
        x[outside] = again
        outside = outside[again >= size]
    return x


def key(seed: int, number: int) -> int:
    """Return the 32-bit key of a round."""
    low, high = seed & HALF, seed >> 32
    return _mixed(_mixed((low + number * STEP) & HALF) ^ high)


def _image(x: torch.Tensor, keys: list[int], a: int, b: int) -> torch.Tensor:
    right = x // a
    left = x - right * a
    scratchs = torch.empty_like(x), torch.empty_like(x)
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        _move(left, right, first, a, *scratchs)
        _move(right, left, second, b, *scratchs)
    return left.add_(right.mul_(a))


def _move(
    half: torch.Tensor, other: torch.Tensor, key: int, side: int, x: torch.Tensor, y: torch.Tensor
) -> None:
    """Add a keyed function of ``other`` to ``half``, modulo ``side``; overwrites ``x`` and ``y``.

    All in place: on a CPU, fresh tensors and a division would double the time of a draw.
    """
    torch.add(other, key, out=x)
    _mix(x.bitwise_and_(HALF), y)
    half.add_(x.mul_(side).bitwise_right_shift_(32)).sub_(side)
    torch.bitwise_right_shift(half, 63, out=y)  # all bits set if it is below 0
    half.add_(y.bitwise_and_(side))


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Return numbers of 32 bits with their bits mixed; a bijection."""
    return _mix(x.clone(), torch.empty_like(x))


def _mix(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        torch.bitwise_right_shift(x, 16, out=scratch)
        x.bitwise_xor_(scratch).mul_(FACTOR).bitwise_and_(HALF)
    torch.bitwise_right_shift(x, 16, out=scratch)
    return x.bitwise_xor_(scratch)


def _mixed(x: int) -> int:
    for _ in range(2):
        x = ((x >> 16) ^ x) * FACTOR & HALF
    return (x >> 16) ^ x
