"""The registered twin of each operator: what torch.compile traces and autograd differentiates."""

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

from commlib._checks import check_tensor
from commlib._context import CommContext
from commlib._manager import comm
from commlib._streams import capturing
from commlib._work import Work
from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.ops._compile_cache import cacheable
from commlib.ops._ordered import order
from commlib.ops._traced_ring import outside_group

_library = torch.library.Library("commlib", "DEF")
_EVERY_DEVICE = "CompositeExplicitAutograd"


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
    overload = getattr(torch.ops.commlib, name.removeprefix("commlib::")).default
    _library.impl(name, outside_group(overload, run) if ordered else run, _EVERY_DEVICE)
    torch.library.register_fake(name, cacheable(fake), lib=_library)
    if backward is not None:
        torch.library.register_autograd(name, backward, setup_context=setup, lib=_library)
    if ordered:
        order(overload, _library)
    return overload


def traced(verb: str, use_calc_stream: bool, sync_op: bool) -> bool:
    """Whether a call is being traced by torch.compile; refuses what an eager call refuses."""
    if not is_compiling():
        return False
    _check_async(verb, use_calc_stream, sync_op)
    return True


def registered(
    verb: str,
    x: torch.Tensor,
    ring_id: int,
    out: torch.Tensor | None,
    use_calc_stream: bool,
    sync_op: bool,
) -> bool:
    """Whether a call has to go through the registered twin: it is traced, or wants a gradient."""
    if is_compiling():
        return traced(verb, use_calc_stream, sync_op)
    if not (getattr(x, "requires_grad", False) and torch.is_grad_enabled()):
        return False
    context = checked(verb, x, ring_id)  # the dispatcher would answer for other devices by itself
    _check_async(verb, use_calc_stream, sync_op)
    if out is not None:
        raise ArgumentError(
            f"{context.where(verb)}: out= of shape {tuple(out.shape)} and {out.dtype} with an x "
            f"that requires grad: no gradient can flow through out; type x.detach(), or leave "
            f"out= away"
        )
    return True


def _check_async(verb: str, use_calc_stream: bool, sync_op: bool) -> None:
    if use_calc_stream and not sync_op:
        raise ArgumentError(
            f"{verb}: sync_op=False with use_calc_stream=True: a call on the caller's own stream "
            f"is already ordered, so there is nothing to wait for; type use_calc_stream=False"
        )


def checked(verb: str, x: torch.Tensor, ring_id: int) -> CommContext:
    """Return the ring of an eager call once ``x`` is known to be a dense tensor on its device."""
    context = comm(ring_id)
    check_tensor(context, verb, "x", x)
    return context


def like(x: torch.Tensor) -> torch.Tensor:
    """Return a new dense tensor of the shape of ``x``."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def raw_output(
    context: CommContext, make: Callable[..., torch.Tensor], *given: Any
) -> torch.Tensor:
    """Make the output of a raw call, which writes it on the ring's stream without a fence.

    On the current stream it could get memory that queued kernels of that stream still use.
    """
    if is_compiling() or context.stream is None or capturing():  # compiled code and captures fence
        return make(*given)
    calc = torch.cuda.current_stream(context.device)
    with torch.cuda.stream(context.stream):
        out = make(*given)
    out.record_stream(calc)  # the program reads it there
    return out


def deliver(result: torch.Tensor, out: torch.Tensor | None, sync_op: bool) -> Any:
    """Hand out what a registered twin returned as the eager call would: in ``out``, or as Work."""
    if out is not None:
        if out.dtype != result.dtype:
            raise DtypeError(f"out is {out.dtype}; expected {result.dtype}, the dtype of x")
        if out.numel() != result.numel():
            raise ShapeError(f"out has shape {tuple(out.shape)}; expected {tuple(result.shape)}")
        result = out.copy_(result.view(out.shape))
    return result if sync_op else Work(result)


def save(*places: int) -> Callable[..., None]:
    """Return a set-up that keeps the non-tensor arguments at ``places`` for the backward."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.kept = tuple(inputs[place] for place in places)

    return setup


def once(verb: str) -> Callable[..., None]:
    """Return the backward of a gradient that has none, for it would be cut without a word."""

    def refuse(ctx: Any, *grads: object) -> None:
        raise ArgumentError(f"the gradient of {verb} has no gradient")

    return refuse


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
