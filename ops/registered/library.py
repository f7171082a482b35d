"""The registered twin of each operator: what torch.compile traces and autograd differentiates."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from commlib.core.context import CommContext
from commlib.core.group import needs_result
from commlib.core.manager import comm
from commlib.core.modes import active, depth, is_tracing
from commlib.core.tensors import has_memory, is_symbolic
from commlib.core.validation import check_out, check_tensor
from commlib.core.work import Work
from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.ops.registered import autograd
from commlib.ops.registered.compile_cache import cacheable
from commlib.ops.registered.ordered import order
from commlib.ops.registered.traced_ring import outside_group
from commlib.ops.registered.vmap import batched, unbatched
from commlib.streams import capturing

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
    vmap: str | None = None,
) -> Any:
    """Register ``commlib::<schema>`` and return its overload.

    ``ordered`` operators keep their place among each other and are not removed when nobody uses
    their result: every rank must call them. An operator that writes to its arguments can't be
    ordered, hence all of them return fresh tensors. ``vmap``: where the first argument, the
    only tensor, may have one dimension more, and the result then too ("any", "first", "last").
    """
    name = f"commlib::{schema.partition('(')[0]}"
    # torch.jit.trace removes and merges what is not conservative.
    _library.define(schema, alias_analysis="CONSERVATIVE" if ordered else "")
    overload = getattr(torch.ops.commlib, name.removeprefix("commlib::")).default
    _library.impl(name, outside_group(overload, run) if ordered else run, _EVERY_DEVICE)
    torch.library.register_fake(name, cacheable(fake), lib=_library)
    if backward is not None:
        kernel = autograd.kernel(overload, setup, backward)
        _library.impl(name, kernel, "Autograd", with_keyset=True)
    rule = batched(overload, vmap) if vmap else unbatched(overload)
    torch.library.register_vmap(name, rule, lib=_library)
    if ordered:
        order(overload, _library)
    return overload


def _kind(tensor: torch.Tensor) -> str:
    name = type(tensor).__name__
    return f"a symbolic {name}" if is_symbolic(tensor) else f"an ordinary {name}"


def needs_op(*tensors: Any) -> bool:
    """Return True if a call has to take its registered op.

    That is so where something traces or watches operators, and for a tensor whose values torch's
    dispatcher has to provide first (pending, zero, fake and functorch tensors).
    """
    return is_compiling() or active() or not all(map(has_memory, tensors))


def traced(
    verb: str, use_calc_stream: bool, sync_op: bool, ring_id: int = 0, **tensors: Any
) -> bool:
    """Return True if ``needs_op``; refuses what an eager call refuses.

    ``tensors``: the arguments by name; None is left out, and ``out`` has to be writable.
    """
    if is_compiling():
        _check_async(verb, use_calc_stream, sync_op)
        return True
    needed = active()
    for role, tensor in tensors.items():
        if tensor is not None:
            needed = needed or not has_memory(tensor)
        elif role == "x":
            needed = True  # to be refused
    if needed:
        _check_traced(verb, ring_id, tensors)
        _check_async(verb, use_calc_stream, sync_op)
    return needed


def _check_traced(verb: str, ring_id: int, tensors: dict[str, Any]) -> None:
    """Refuse tensors that a registered op can't take, before it is called."""
    context = comm(ring_id)
    for role, tensor in tensors.items():
        if role != "out" and (tensor is not None or role == "x"):
            check_tensor(context, verb, role, tensor)
    out = tensors.get("out")
    if out is not None:
        _check_traced_out(context, verb, out, tensors.get("x", out))
    if context._open_group is not None:
        context._open_group.expect_op()


def _check_traced_out(context: CommContext, verb: str, out: torch.Tensor, x: torch.Tensor) -> None:
    """Refuse an out that the result of a registered op can't be copied to."""
    check_out(context, verb, out)
    if is_symbolic(out) is not is_symbolic(x):
        raise ArgumentError(
            f"{context._describe(verb)}: out is {_kind(out)} and x is {_kind(x)}; expected both "
            f"from one mode or transform; leave out= away"
        )
    if context._open_group is not None:
        raise ArgumentError(
            f"{context._describe(verb)}: out inside comm.group() where a mode or a trace is "
            f"active: "
            f"out would be filled before the group is launched; leave the mode, or make the call "
            f"outside of the group"
        )


def registered(
    verb: str,
    x: torch.Tensor,
    ring_id: int,
    out: torch.Tensor | None,
    use_calc_stream: bool,
    sync_op: bool,
) -> bool:
    """Return True if a call has to take its registered op: as ``traced``, or for a gradient."""
    if is_compiling():
        return traced(verb, use_calc_stream, sync_op)
    needed = (
        depth() > 0
        or is_tracing()
        or forward_ad._current_level >= 0
        or not has_memory(x)
        or not (out is None or out is x or has_memory(out))
    ) and traced(verb, use_calc_stream, sync_op, ring_id, x=x, out=out)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return needed
    context = checked(verb, x, ring_id)  # the dispatcher would answer for other devices by itself
    _check_async(verb, use_calc_stream, sync_op)
    needs_result(context, verb)
    if out is not None:
        raise ArgumentError(
            f"{context._describe(verb)}: out= of shape {tuple(out.shape)} and {out.dtype} with an "
            f"x that requires grad: no gradient can flow through out; call x.detach(), or leave "
            f"out= away"
        )
    return True


def _check_async(verb: str, use_calc_stream: bool, sync_op: bool) -> None:
    if use_calc_stream and not sync_op:
        raise ArgumentError(
            f"{verb}: sync_op=False with use_calc_stream=True: a call on the caller's own stream "
            f"is already ordered, so there is nothing to wait for; pass use_calc_stream=False"
        )


def checked(verb: str, x: torch.Tensor, ring_id: int) -> CommContext:
    """Return the ring of a call once ``x`` is known to be a readable tensor on its device."""
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
    if needs_op() or context.stream is None or capturing():  # registered ops and captures fence
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
