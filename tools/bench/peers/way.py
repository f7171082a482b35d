"""One way to add bfloat16 tensors up over the ranks, and whether it gives the right sum."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

DTYPE = torch.bfloat16
ROUNDING = 2.0**-8  # of a bfloat16 sum, in relation to the magnitudes that are added

Tensor = torch.Tensor


class Way(NamedTuple):
    """One way to add up: the tensor it reads, and the call that returns what comes out."""

    x: Tensor
    call: Callable[[], Any]


class Near(NamedTuple):
    """An exact result in float64, and how far a right one may be away from it."""

    exact: Tensor
    slack: Tensor

    def holds(self, found: Tensor) -> bool:
        """Return True if ``found`` is right everywhere; NaN is not."""
        return bool(((found.double() - self.exact).abs() <= self.slack).all())


def expect_sum(x: Tensor) -> tuple[Near]:
    """Return the sum of every rank's ``x``."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return (exact_sum(parts),)


def exact_sum(parts: Sequence[Tensor]) -> Near:
    """Return the sum of ``parts``; a right one may have been rounded at each addition."""
    exact = torch.zeros_like(parts[0], dtype=torch.float64)
    magnitudes = torch.zeros_like(exact)
    for part in parts:
        exact += part
        magnitudes += part.abs()
    return Near(exact, magnitudes * ROUNDING * len(parts))
