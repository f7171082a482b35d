"""Blocks that torch.compile leaves to eager code."""

from contextlib import AbstractContextManager

import torch

from commlib.core.compiler import leave_to_eager, untraced

_COMPILED = (
    "DistributedFusedLamb is not traced: its kernels are fused already. Call step() outside the "
    "compiled function, or capture it by commlib.graph.capture"
)


def eager() -> AbstractContextManager[None]:
    """Return a block without gradients that torch.compile leaves to eager code."""
    if torch.compiler.is_compiling():
        leave_to_eager(_COMPILED)
    return untraced(torch.no_grad())
