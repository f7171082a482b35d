"""The registered twin of each operator: what torch.compile traces and autograd differentiates."""

from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops import effects
from torch.compiler import is_compiling

from commlib._work import Work
from commlib.errors import ArgumentError, ShapeError

_library = torch.library.Library("commlib", "DEF")


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    ordered: bool = True,
) -> Any:
    """Register ``commlib::<schema>`` and return its overload.

    ``ordered`` operators keep their place among each other and are not removed when nobody uses
    their result: every rank must call them. An operator that writes to its arguments can't be
    ordered, hence all of them return fresh tensors.
    """
    name = f"commlib::{schema.partition('(')[0]}"
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(name, backward, setup_context=setup, lib=_library)
    overload = getattr(torch.ops.commlib, name.removeprefix("commlib::")).default
    if ordered:
        effects._register_effectful_op(overload, effects._EffectType.ORDERED)
    return overload


def registered(x: torch.Tensor) -> bool:
    """Whether a call has to go through the registered twin: it is traced, or wants a gradient."""
    if is_compiling():
        return True
    try:
        return x.requires_grad and torch.is_grad_enabled()
    except AttributeError:
        raise ArgumentError(f"given {type(x).__name__}; expected a torch.Tensor") from None


def deliver(result: torch.Tensor, out: torch.Tensor | None, sync_op: bool) -> Any:
    """Hand out what a registered twin returned as the eager call would: in ``out``, or as Work."""
    if out is not None:
        if out.numel() != result.numel() or out.dtype != result.dtype:
            raise ShapeError(
                f"out of shape {tuple(out.shape)} and {out.dtype}; expected {tuple(result.shape)} "
                f"and {result.dtype}"
            )
        result = out.copy_(result.view(out.shape))
    return result if sync_op else Work(result)


def save(*places: int) -> Callable[..., None]:
    """Return a set-up that keeps the non-tensor arguments at ``places`` for the backward."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.kept = tuple(inputs[place] for place in places)

    return setup


def rows(x: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Return dim 0 and the rest of the shape; a 0-D tensor counts as one row."""
    return (x.shape[0], tuple(x.shape[1:])) if x.dim() else (1, ())


def rows_of(where: str, x: torch.Tensor, size: int) -> tuple[int, ...]:
    """Return the shape of one rank's part of ``x`` along dim 0; raises ``ShapeError``."""
    count, rest = rows(x)
    if count % size:
        raise ShapeError(
            f"{where}: dim 0 of x, shape {tuple(x.shape)}, does not divide by the ring's size "
            f"{size}; pad it to {-(-count // size) * size} rows"
        )
    return (count // size, *rest)
