"""Rows as float8 with a scale per group of elements."""

import torch

from commlib.p2p.experts.tables import FLOAT8, GROUP

LARGEST = 448.0  # of FLOAT8


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows as float8, and their scales: float32 [rows, width / GROUP].

    A scale is the largest magnitude of its elements / 448; 1 where that is 0 in float32. Where it
    is subnormal, its rounding may bring elements beyond 448: they become 448, not NaN.
    """
    parts = x.float().view(x.shape[0], x.shape[1] // GROUP, GROUP)
    largest = parts.abs().amax(2)
    # On a GPU torch multiplies by the inverse of a number, which rounds otherwise.
    scales = largest / torch.full_like(largest, LARGEST)
    scales = torch.where(scales == 0, 1.0, scales)
    elements = (parts / scales[:, :, None]).clamp(-LARGEST, LARGEST)
    return elements.view(x.shape).to(FLOAT8), scales
