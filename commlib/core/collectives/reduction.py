"""The reduction of a call in the engine's own terms."""

from typing import Any

import torch

from commlib.core.ring import Ring
from commlib.engines.reduction_names import RingReduction, reduction_name
from commlib.errors import ArgumentError


def reduction_of(
    ring: Ring, collective: str, x: torch.Tensor, op: RingReduction, factor: float | None = None
) -> Any:
    """Return what the launches of the ring's engine take for ``op`` over the dtype of ``x``."""
    try:
        return ring._engine.reduction(x.dtype, reduction_name(op), factor)
    except ArgumentError as error:
        raise type(error)(f"{ring._describe(collective)}: {error}") from None
