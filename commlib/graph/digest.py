"""Numbers that stand for the bits of memory: they tell whether a call has changed it."""

from collections.abc import Iterable, Sequence

import torch

_BLOCK = 1 << 22  # words at a time: what is computed on the way takes no more than that, twice
_MIX = -7046029254386353131, -4658895280553007687  # odd, their bits as if at random


def digests(memory: Iterable[torch.UntypedStorage]) -> list[int]:
    """Return a number for the bits of each piece of memory."""
    bits = list(map(whole, memory))
    places: dict[torch.device, torch.Tensor] = {}
    for device in {x.device for x in bits}:
        longest = max(x.numel() for x in bits if x.device == device) // 4
        places[device] = _weights(max(4, min(longest, _BLOCK)), device)
    return _read([_digest(x, places[x.device]) for x in bits])


def whole(memory: torch.UntypedStorage) -> torch.Tensor:
    """Return all of a piece of memory as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers, as if at random: sums that they weigh differ where a word does."""
    found = torch.arange(1, count + 1, device=device).mul_(_MIX[0])
    return found.bitwise_xor_(found >> 29).mul_(_MIX[1]).bitwise_or_(1)


def _digest(bits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return a sum over the words of ``bits``, each times the number of its place."""
    even = bits.numel() // 4 * 4
    blocks = [*bits[:even].view(torch.int32).split(_BLOCK)] if even else []
    if even < bits.numel() or not blocks:
        blocks.append(bits[even:])
    sums = [(block * places[: len(block)]).sum() for block in blocks]
    total: torch.Tensor = sums[0]
    for one in sums[1:]:
        total = total * _MIX[0] + one
    return total


def _read(numbers: Sequence[torch.Tensor]) -> list[int]:
    """Return the values; the host waits once for each device."""
    found = [0] * len(numbers)
    for device in {x.device for x in numbers}:
        places = [i for i, x in enumerate(numbers) if x.device == device]
        values = torch.stack([numbers[i] for i in places]).tolist()
        for i, value in zip(places, values, strict=True):
            found[i] = value
    return found
