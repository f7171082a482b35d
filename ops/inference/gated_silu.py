"""silu(gate) * inner of a gated feed-forward layer: one kernel on GPUs."""

from typing import Any

import torch
import torch.nn.functional as F

from commlib.ops.inference.few_rows import are_few, is_traced, may_take_kernel
from commlib.ops.registered.library import register
from commlib.ops.triton_support import has_triton

Tensor = torch.Tensor

MOST_ROWS = 2**31 - 1  # programs of a grid


def gated_silu(x: Tensor) -> Tensor:
    """Return silu(x[..., :n]) * x[..., n:], where ``x`` has 2 * n columns; both are rounded."""
    if may_take_kernel(MOST_ROWS, x) and has_triton():
        call: Any = _registered_op if is_traced() else _run
        result: Tensor = call(x)
        return result
    return _composed(x)


def _composed(x: Tensor) -> Tensor:
    gate, inner = x.chunk(2, dim=-1)
    return F.silu(gate) * inner


def _run(x: Tensor) -> Tensor:
    if not (x.is_cuda and are_few(MOST_ROWS, x) and has_triton()):
        return _composed(x)
    from commlib.ops.inference import gated_kernels as kernels  # imports Triton

    out = _fake(x)
    kernels.gated_silu(x.contiguous(), out)
    return out


def _fake(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


_registered_op = register("gated_silu(Tensor x) -> Tensor", _run, _fake, ordered=False)
