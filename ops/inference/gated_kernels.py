"""Triton kernel of the activation between the two linear layers of a gated feed-forward part.

Only imported for tensors on a GPU.
"""

# Triton ships no types, and its kernels are not Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

COLUMNS = 1024  # of a program


def gated_silu(x: Tensor, out: Tensor) -> None:
    """Fill ``out`` [..., n] with silu(x[..., :n]) * x[..., n:]."""
    columns = out.shape[-1]
    grid = out.numel() // columns, triton.cdiv(columns, COLUMNS)
    with torch.cuda.device_of(x):
        _gated_silu[grid](x, out, columns, COLUMNS=COLUMNS)


@triton.jit
def _gated_silu(x, out, columns, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists, at = column < columns, row * columns + column
    first = x + row * columns + at
    gate = tl.load(first, mask=exists, other=0.0).to(tl.float32)
    inner = tl.load(first + columns, mask=exists, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + at, (opened.to(tl.float32) * inner).to(out.dtype.element_ty), mask=exists)
