"""Linear layers over the few rows of a decode step: which calls a kernel on a GPU takes."""

import torch

from commlib.core.modes import depth, is_tracing
from commlib.core.tensors import has_memory

Tensor = torch.Tensor

DTYPES = (torch.float16, torch.bfloat16)


def may_take_kernel(most: int, x: Tensor, *others: Tensor | None) -> bool:
    """Return True for at most ``most`` rows of short floats on a GPU, without a gradient."""
    if not (x.is_cuda and x.dtype in DTYPES and 0 < x.numel() <= most * x.shape[-1]):
        return False
    tensors = [x, *(t for t in others if t is not None)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return is_traced() or all(map(has_memory, tensors))


def is_traced() -> bool:
    """Return True where a call has to be a registered op."""
    return torch.compiler.is_compiling() or bool(depth()) or is_tracing()
