"""Linear layers with a weight of short floats: on GPUs a kernel reads large ones for a few rows."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from commlib.ops.inference.few_rows import are_few, is_traced, may_take_kernel
from commlib.ops.registered.library import register
from commlib.ops.triton_support import has_triton

Tensor = torch.Tensor

MOST_ROWS = 16  # of more, torch's product takes as little time
LEAST_BYTES = 2**23  # of a weight whose bytes are what takes the time
SHARED_BYTES = 2**17  # that the kernel needs of a multiprocessor


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias.

    A few rows and a large weight on a GPU take one kernel, which adds in float32 and rounds once.
    The bits of a row do not depend on the other rows then. Otherwise it is torch's product.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs], in the dtype of ``x``.
        bias: [outputs].

    Returns:
        [..., outputs], in the dtype of ``x``.
    """
    large = weight.dtype is x.dtype and weight.numel() * weight.itemsize >= LEAST_BYTES
    if large and may_take_kernel(MOST_ROWS, x, weight, bias) and weight.is_contiguous():
        call: Any = _registered_op if is_traced() else _run
        result: Tensor = call(x, weight, bias)
        return result
    return F.linear(x, weight, bias)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    served = are_few(MOST_ROWS, x) and weight.is_contiguous() and x.is_cuda and has_triton()
    if not (served and _fits(x.device.index)):
        return F.linear(x, weight, bias)
    from commlib.ops.inference import linear_kernels as kernels  # imports Triton

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty((rows.shape[0], weight.shape[0]))
    kernels.dense(rows, weight, None if bias is None else bias.contiguous(), out)
    return out.view(*x.shape[:-1], weight.shape[0])


@cache
def _fits(gpu: int) -> bool:
    properties: Any = torch.cuda.get_device_properties(gpu)
    return bool(properties.shared_memory_per_block_optin >= SHARED_BYTES)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_registered_op = register(
    "dense_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _run, _fake, ordered=False
)
