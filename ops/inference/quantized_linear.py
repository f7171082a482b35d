"""Linear layers with a quantized weight: on GPUs a kernel reads its bytes where they are."""

from functools import cache
from typing import Any

import torch

from commlib.ops.inference.few_rows import are_few, is_traced, may_take_kernel
from commlib.ops.registered.library import register
from commlib.ops.triton_support import has_triton

Tensor = torch.Tensor

MOST_ROWS = 64  # With more rows, converting the weight first takes less time.
EXPONENT = 0x7F800000  # The bits of a float32 that hold its exponent.
LEAST_POWER = 2.0**-14  # Times this or a higher power of two, all values are exact in float16.
FP8_SINCE = 8, 9  # The compute capability that converts float8 in one instruction.


def quantized_linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ (values * scales[:, None]).T + bias.

    A few rows on a GPU take one kernel: it converts the weight in registers, adds in float32 and
    rounds once. Otherwise the weight is converted to the dtype of ``x`` first.

    Args:
        x: [..., inputs].
        values: [outputs, inputs], int8 or float8_e4m3fn.
        scales: [outputs], float32.
        bias: [outputs], in the dtype of ``x``.

    Returns:
        [..., outputs], in the dtype of ``x``.
    """
    if may_take_kernel(MOST_ROWS, x, values, scales, bias):
        call: Any = _registered_op if is_traced() else _run
        result: Tensor = call(x, values, scales, bias)
        return result
    return _converted(x, values, scales, bias)


def _run(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    served = x.is_cuda and are_few(MOST_ROWS, x) and has_triton()
    if not served or not (values.dtype is torch.int8 or _converts_float8(x.device.index)):
        return _converted(x, values, scales, bias)
    from commlib.ops.inference import linear_kernels as kernels  # imports Triton

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty((rows.shape[0], values.shape[0]))
    shift = None if bias is None else bias.contiguous()
    kernels.quantized(rows, values.contiguous(), scales.contiguous(), shift, out)
    return out.view(*x.shape[:-1], values.shape[0])


@cache
def _converts_float8(gpu: int) -> bool:
    return torch.cuda.get_device_capability(gpu) >= FP8_SINCE


def _converted(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    powers = _powers(scales)
    weight = values.to(x.dtype) * powers.to(x.dtype)[:, None]
    y = torch.nn.functional.linear(x, weight) * (scales / powers)
    y = y if bias is None else y + bias
    return y.to(x.dtype)


def _powers(scales: Tensor) -> Tensor:
    """Return the powers of two below the scales, by which the weight is scaled without rounding.

    The product of the values alone, which are up to 448, would overflow in float16.
    """
    powers = (scales.view(torch.int32) & EXPONENT).view(torch.float32)
    return powers.clamp(min=LEAST_POWER)


def _fake(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], values.shape[0]))


_registered_op = register(
    "quantized_linear(Tensor x, Tensor values, Tensor scales, Tensor? bias) -> Tensor",
    _run,
    _fake,
    ordered=False,
)
