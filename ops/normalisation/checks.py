"""Argument checks of data_norm."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.validation import check_tensor, overlaps_itself
from commlib.errors import ArgumentError, DtypeError, ShapeError

Tensor = torch.Tensor

NAME = "data_norm"
DTYPES = (torch.float32, torch.float64)
SUMMARIES = ("batch_size", "batch_sum", "batch_square_sum")
LARGEST_EPSILON = 1e-3


def check_traced(behaviour: str, summaries: Sequence[Tensor]) -> None:
    """Raise if a summary requires grad: not every torch traces a backward that writes to it."""
    if behaviour == "gpu" and any(summary.requires_grad for summary in summaries):
        raise ArgumentError(
            f"{NAME}: compiled with behaviour='gpu', a summary requires grad, but its .grad stays "
            f"None; call batch_size.requires_grad_(False), and the same on the other two"
        )


def check_options(
    epsilon: float,
    slot_dim: int,
    decay: float,
    behaviour: str,
    scale_w: Tensor | None,
    bias: Tensor | None,
    sync_stats: bool,
) -> None:
    """Raise for options that are out of range or do not fit ``behaviour``."""
    if behaviour not in ("gpu", "cpu"):
        raise ArgumentError(f"{NAME}: behaviour={behaviour!r}; expected 'gpu' or 'cpu'")
    if not isinstance(epsilon, (int, float)) or not 0 <= epsilon <= LARGEST_EPSILON:
        raise ArgumentError(
            f"{NAME}: epsilon={epsilon!r}; expected a number from 0 to {LARGEST_EPSILON}; "
            f"pass epsilon=1e-4"
        )
    if not isinstance(decay, (int, float)) or not -math.inf < decay < math.inf:
        raise ArgumentError(f"{NAME}: summary_decay_rate={decay!r}; expected a finite number")
    if isinstance(slot_dim, bool) or not isinstance(slot_dim, int) or not slot_dim >= -1:
        raise ArgumentError(f"{NAME}: slot_dim={slot_dim!r}; expected columns per group, or -1")
    if slot_dim == 0:
        raise ArgumentError(f"{NAME}: slot_dim=0; expected columns per group; pass slot_dim=-1")
    if (scale_w is None) != (bias is None):
        missing = "scale_w" if scale_w is None else "bias"
        raise ArgumentError(f"{NAME}: {missing} is missing; pass scale_w= and bias=, or neither")
    for name, is_set in (("slot_dim", slot_dim > 0), ("scale_w and bias", scale_w is not None)):
        if is_set and behaviour == "gpu":
            raise ArgumentError(
                f"{NAME}: {name} with behaviour='gpu', which does not support it; "
                f"pass behaviour='cpu'"
            )
    if sync_stats and behaviour == "cpu":
        raise ArgumentError(
            f"{NAME}: sync_stats=True with behaviour='cpu', which updates no summaries; "
            f"pass behaviour='gpu', or all_reduce their .grad"
        )


def check_tensors(ring: CommContext, tensors: Sequence[Any], slot_dim: int) -> None:
    """Raise for other dtypes, shapes or devices, and for columns that do not divide into groups."""
    x, *columns = tensors
    prefix = ring._describe(NAME)
    check_tensor(ring, NAME, "x", x)
    if x.dtype not in DTYPES:
        raise DtypeError(f"{prefix}: x is {x.dtype}; expected float32 or float64; pass x.float()")
    if x.dim() != 2:
        raise ShapeError(
            f"{prefix}: x has shape {tuple(x.shape)}; expected [N, C]; pass x.flatten(1)"
        )
    for name, tensor in zip((*SUMMARIES, "scale_w", "bias"), columns, strict=True):
        if tensor is None and name not in SUMMARIES:
            continue
        check_tensor(ring, NAME, name, tensor)
        if tensor.dtype != x.dtype:
            raise DtypeError(
                f"{prefix}: {name} is {tensor.dtype} and x is {x.dtype}; expected one dtype; "
                f"pass {name}.to({x.dtype})"
            )
        if tensor.dim() != 1 or tensor.shape[0] != x.shape[1]:
            raise ShapeError(
                f"{prefix}: {name} has shape {tuple(tensor.shape)} and x {tuple(x.shape)}; "
                f"expected ({x.shape[1]},), one value per column"
            )
    if slot_dim > 0 and x.shape[1] % slot_dim:
        raise ShapeError(
            f"{prefix}: slot_dim={slot_dim} with x of shape {tuple(x.shape)}; expected a divisor "
            f"of its {x.shape[1]} columns"
        )


def check_writable(ring: CommContext, summaries: Sequence[Tensor]) -> None:
    """Raise for summaries whose update would overwrite another one."""
    for name, summary in zip(SUMMARIES, summaries, strict=True):
        if overlaps_itself(summary):
            raise ArgumentError(
                f"{ring._describe(NAME)}: {name} of shape {tuple(summary.shape)} and strides "
                f"{summary.stride()} overlaps itself and can't be updated; pass {name}.clone()"
            )
    if len({summary.data_ptr() for summary in summaries}) < 3 and summaries[0].numel():
        raise ArgumentError(
            f"{ring._describe(NAME)}: two of {', '.join(SUMMARIES)} are one memory, but each has "
            f"its own update; pass a .clone() of one of them"
        )
