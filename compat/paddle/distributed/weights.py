"""The check of a weight that the program owns."""

from collections.abc import Sequence
from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.errors import ArgumentError, ShapeError


def checked_part(
    ring: CommContext, name: str, weight: Any, part: Sequence[int], argument: str = "param_attr"
) -> torch.Tensor:
    """Return this rank's weight of shape ``part``.

    Raises:
        ArgumentError: It is not a tensor.
        ShapeError: It has another shape.
    """
    start = ring._describe(name)
    if not isinstance(weight, torch.Tensor):
        raise ArgumentError(
            f"{start}: {argument}={weight!r}; expected this rank's weight as a tensor, since no "
            f"program owns it; pass a torch.nn.Parameter, or use VocabParallelEmbedding, "
            f"ColumnParallelLinear or RowParallelLinear"
        )
    if list(weight.shape) != list(part):
        raise ShapeError(
            f"{start}: {argument} has shape {tuple(weight.shape)}; expected {tuple(part)}, this "
            f"rank's part"
        )
    return weight
