"""Triton kernel of a linear layer with a weight of 8 bits, for the few rows of a decode step.

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

OUTPUTS, INPUTS = 16, 512  # of the weight, that a program has in flight at a time
WARPS, STAGES = 4, 4
LEAST_ROWS = 16  # of a product on tensor cores


def linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fill ``out`` [rows, outputs] with x @ values.T * scales + bias."""
    (rows, inputs), outputs = x.shape, values.shape[0]
    with torch.cuda.device_of(x):
        _linear[(triton.cdiv(outputs, OUTPUTS),)](
            x,
            values,
            scales,
            bias,
            out,
            rows,
            outputs,
            inputs,
            ROWS=max(LEAST_ROWS, triton.next_power_of_2(rows)),
            OUTPUTS=OUTPUTS,
            INPUTS=INPUTS,
            num_warps=WARPS,
            num_stages=STAGES,
        )


@triton.jit(do_not_specialize=["rows"])
def _linear(
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
    given, exists = row < rows, output < outputs
    place = tl.arange(0, INPUTS)
    x_at = x + row[:, None] * inputs + place[None, :]
    value_at = values + output[:, None].to(tl.int64) * inputs + place[None, :]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, inputs, INPUTS):
        there = place < inputs - start
        part = tl.load(x_at + start, mask=given[:, None] & there[None, :], other=0.0)
        value = tl.load(value_at + start, mask=exists[:, None] & there[None, :], other=0.0)
        total = tl.dot(part, value.to(part.dtype).T, total)
    y = total * tl.load(scales + output, mask=exists, other=0.0)[None, :]
    if bias is not None:
        y += tl.load(bias + output, mask=exists, other=0.0).to(tl.float32)[None, :]
    at = out + row[:, None] * outputs + output[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=given[:, None] & exists[None, :])
