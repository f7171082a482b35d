"""Digests of memory: they show whether a call has changed it."""

from collections.abc import Iterable, Sequence

import torch

_BLOCK = 1 << 22  # words at a time: temporaries take at most twice as much
_MIX = -7046029254386353131, -4658895280553007687  # odd, with pseudo-random bits


def digests(memory: Iterable[torch.UntypedStorage]) -> list[int]:
    """Return one digest per piece of memory."""
    bits = list(map(whole, memory))
    weights: dict[torch.device, torch.Tensor] = {}
    for device in {x.device for x in bits}:
        longest = max(x.numel() for x in bits if x.device == device) // 4
        weights[device] = _weights(max(4, min(longest, _BLOCK)), device)
    return _read([_digest(x, weights[x.device]) for x in bits])


def whole(memory: torch.UntypedStorage) -> torch.Tensor:
    """Return a whole piece of memory as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd pseudo-random weights: a weighted sum differs where a word does."""
    mixed = torch.arange(1, count + 1, device=device).mul_(_MIX[0])
    return mixed.bitwise_xor_(mixed >> 29).mul_(_MIX[1]).bitwise_or_(1)


def _digest(bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of the words of ``bits``, each times its weight."""
    even = bits.numel() // 4 * 4
    blocks = [*bits[:even].view(torch.int32).split(_BLOCK)] if even else []
    if even < bits.numel() or not blocks:
        blocks.append(bits[even:])
    sums = [(block * weights[: len(block)]).sum() for block in blocks]
    total: torch.Tensor = sums[0]
    for one in sums[1:]:
        total = total * _MIX[0] + one
    return total


def _read(numbers: Sequence[torch.Tensor]) -> list[int]:
    """Return the values; the host waits once per device."""
    result = [0] * len(numbers)
    for device in {x.device for x in numbers}:
        indices = [i for i, x in enumerate(numbers) if x.device == device]
        values = torch.stack([numbers[i] for i in indices]).tolist()
        for i, value in zip(indices, values, strict=True):
            result[i] = value
    return result
