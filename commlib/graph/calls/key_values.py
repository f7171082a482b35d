"""Plain values in a cache key."""

from typing import Any

import numpy as np
import torch


def value(x: Any) -> tuple[Any, ...]:
    """Return what tells a plain value from another: numbers by type and bits, modules by modes."""
    if isinstance(x, float):
        return type(x), x.hex()
    if isinstance(x, complex):
        return type(x), x.real.hex(), x.imag.hex()
    if isinstance(x, np.generic):
        return type(x), x.tobytes()
    if isinstance(x, tuple):
        return type(x), *map(value, x)
    if isinstance(x, set | frozenset):
        return type(x), frozenset(map(value, x))
    if isinstance(x, slice):
        return slice, value(x.start), value(x.stop), value(x.step)
    if isinstance(x, bytearray):
        return bytearray, bytes(x)
    if isinstance(x, torch.nn.Module):
        return type(x), x, *(part.training for part in x.modules())
    return type(x), x
