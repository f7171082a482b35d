"""Triton kernels of linear layers for the few rows of a decode step.

Only imported for tensors on a GPU. Sums are float32, and each output is one program's, which adds
its inputs in order: the bits depend on no property of the GPU.
"""

# Triton ships no types, and its kernels are not Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

LEAST_ROWS = 16  # of a product on tensor cores
FEW = 32, 256, 5  # outputs of a program, inputs of a step, steps in flight: the fastest on an H200
MANY = 64, 128, 4  # the same for more rows, which a program reads again for its outputs
WARPS = 4
DENSE = 64, 128, 6  # the same for a weight of 16 bits, the fastest on an H100


def quantized(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fill ``out`` [rows, outputs] with x @ values.T * scales + bias."""
    (rows, inputs), outputs = x.shape, values.shape[0]
    tile = max(LEAST_ROWS, triton.next_power_of_2(rows))
    columns, step, stages = FEW if tile == LEAST_ROWS else MANY
    with torch.cuda.device_of(x):
        _quantized[(triton.cdiv(outputs, columns),)](
            x,
            values,
            scales,
            bias,
            out,
            rows,
            outputs,
            inputs,
            ROWS=tile,
            OUTPUTS=columns,
            INPUTS=step,
            num_warps=WARPS,
            num_stages=stages,
        )


def dense(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fill ``out`` [rows, outputs] with x @ weight.T + bias, for up to ``LEAST_ROWS`` rows."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    columns, step, stages = DENSE
    with torch.cuda.device_of(x):
        _dense[(triton.cdiv(outputs, columns),)](
            x,
            weight,
            bias,
            out,
            rows,
            outputs,
            inputs,
            ROWS=LEAST_ROWS,
            OUTPUTS=columns,
            INPUTS=step,
            num_warps=WARPS,
            num_stages=stages,
        )


@triton.jit(do_not_specialize=["rows"])
def _dense(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Outputs are the rows of the product: a weight goes from shared memory to the tensor cores."""
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row_mask, exists = row < rows, output < outputs
    index = tl.arange(0, INPUTS)
    x_at = x + row[:, None] * inputs + index[None, :]
    weight_at = weight + output[:, None].to(tl.int64) * inputs + index[None, :]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, inputs, INPUTS):
        k_mask = index < inputs - start
        part = tl.load(x_at + start, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
        value = tl.load(weight_at + start, mask=exists[:, None] & k_mask[None, :], other=0.0)
        total = tl.dot(value, part.T, total)
    if bias is not None:
        total += tl.load(bias + output, mask=exists, other=0.0).to(tl.float32)[:, None]
    at = out + row[None, :] * outputs + output[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=row_mask[None, :] & exists[:, None])


@triton.jit(do_not_specialize=["rows"])
def _quantized(
    x,
    values,
    scales,
    bias,
    out,
    rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row_mask, exists = row < rows, output < outputs
    index = tl.arange(0, INPUTS)
    x_at = x + row[:, None] * inputs + index[None, :]
    value_at = values + output[:, None].to(tl.int64) * inputs + index[None, :]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, inputs, INPUTS):
        k_mask = index < inputs - start
        part = tl.load(x_at + start, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
        value = tl.load(value_at + start, mask=exists[:, None] & k_mask[None, :], other=0.0)
        total = tl.dot(part, value.to(part.dtype).T, total)
    y = total * tl.load(scales + output, mask=exists, other=0.0)[None, :]
    if bias is not None:
        y += tl.load(bias + output, mask=exists, other=0.0).to(tl.float32)[None, :]
    at = out + row[:, None] * outputs + output[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=row_mask[:, None] & exists[None, :])
