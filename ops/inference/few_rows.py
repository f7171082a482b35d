"""The kernels of a decode step on a GPU: which calls take them."""

import torch
from torch.autograd import forward_ad

from commlib.core.modes import depth, is_tracing
from commlib.core.tensors import has_memory

Tensor = torch.Tensor

DTYPES = (torch.float16, torch.bfloat16)


def may_take_kernel(most: int, x: Tensor, *others: Tensor | None) -> bool:
    """Return True for at most ``most`` rows of short floats on a GPU, without a gradient.

    While a program is traced, any number of rows: the op decides when it runs.
    """
    if not (x.is_cuda and x.dtype in DTYPES) or forward_ad._current_level >= 0:
        return False
    if not (is_traced() or are_few(most, x)):
        return False
    tensors = [x, *(t for t in others if t is not None)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return is_traced() or all(map(has_memory, tensors))


def are_few(most: int, x: Tensor) -> bool:
    """Return True for 1 to ``most`` rows."""
    return 0 < x.numel() <= most * x.shape[-1]


def is_traced() -> bool:
    """Return True where a call has to be a registered op."""
    return torch.compiler.is_compiling() or bool(depth()) or is_tracing()
