"""Local steps of an engine on this rank's tensors: views, copies, factors and means."""

from typing import Any

import torch

from commlib.engines.reductions import NATIVE, UNSIGNED

Tensor = torch.Tensor


def flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the elements of a dense tensor in one row, seen as ``dtype``."""
    if dtype is tensor.dtype:
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,)).view(dtype)  # one element has any stride


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view that every backend can move: as it is, or as bytes."""
    return flat(tensor, tensor.dtype if tensor.dtype in NATIVE else torch.uint8)


def copy(out: Tensor | None, x: Tensor | None) -> None:
    """Copy dense elements in their order; the shapes may differ."""
    if out is None or x is None or out.data_ptr() == x.data_ptr():
        return
    if out.shape == x.shape:
        out.copy_(x)
    else:
        out.view(-1).copy_(x.view(-1))


def multiplied(out: Tensor | None, x: Tensor, factor: Tensor) -> Tensor:
    """Fill ``out``, or a new tensor, with ``x`` times a factor; returns it."""
    out = torch.empty_like(x) if out is None else out
    with torch.inference_mode(out.is_inference()), torch.no_grad():
        torch.mul(x.view(-1), factor, out=out.view(-1))
    return out


def divide(target: Tensor, size: int) -> None:
    """Divide in place; integers are rounded towards zero, as NCCL does it."""
    # A waiter may be in another grad or inference mode than the caller's.
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        if target.is_floating_point():
            target.div_(size)
        elif target.dtype in UNSIGNED:
            _divide_unsigned(flat(target, UNSIGNED[target.dtype]), size)
        else:  # the size may not fit into the dtype of the elements
            target.copy_(target.to(torch.int64).div_(size, rounding_mode="trunc"))


def _divide_unsigned(target: Tensor, size: int) -> None:
    """Divide unsigned integers in place that are seen as signed ones, for torch divides no others.

    The number is twice its half, and a lowest bit. Neither half nor remainders have a sign bit.
    """
    half = target.bitwise_right_shift(1).bitwise_and_(torch.iinfo(target.dtype).max)
    quotient = half.div(size, rounding_mode="trunc")
    rest = half.sub_(quotient, alpha=size).mul_(2).add_(target.bitwise_and(1))
    target.copy_(quotient.mul_(2).add_(rest.div_(size, rounding_mode="trunc")))


def rows(x: Tensor, segment: Any, first: str) -> Tensor:
    """Return the rows of a segment, which begin at its field ``first``."""
    return x.narrow(0, int(segment[first]), int(segment["rows"]))
