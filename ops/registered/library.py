"""Registered ops: the form of an operator that torch.compile traces and autograd differentiates."""

import inspect
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
from commlib.ops.registered import autograd, late
from commlib.ops.registered.compile_cache import cacheable
from commlib.ops.registered.ordered import order
from commlib.ops.registered.traced_ring import outside_group
from commlib.ops.registered.vmap import batched, unbatched
from commlib.streams import capturing

torch.ops.commlib = late.Namespace("commlib")  # type: ignore[attr-defined]
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

    Args:
        schema: Name, arguments and results, without defaults and keyword arguments.
        run: The implementation for every device. It returns new tensors.
        fake: Returns tensors of the result's shapes and dtypes while a program is traced.
        setup: Called as ``setup(ctx, inputs, output)`` after the forward.
        backward: Called as ``backward(ctx, *grads)``; None for an op without a gradient.
        ordered: Keep the op in program order among ordered ops, and keep it if its result is
            unused: every rank must call it. Ops that write to arguments can't be ordered.
        vmap: Position of the batch dimension in the first argument, the only tensor, and in the
            result: "any", "first" or "last". None for an op that can't be batched.

    Returns:
        The overload ``torch.ops.commlib.<name>.default``.
    """
    name = f"commlib::{schema.partition('(')[0]}"
    # torch.jit.trace removes and merges what is not conservative.
    _library.define(schema, alias_analysis="CONSERVATIVE" if ordered else "")
    overload = getattr(torch.ops.commlib, name.removeprefix("commlib::")).default
    _library.impl(name, outside_group(overload, run) if ordered else run, _EVERY_DEVICE)
    _register_fake(name, cacheable(fake))
    if backward is not None:
        kernel = autograd.kernel(overload, setup, backward)
        _library.impl(name, kernel, "Autograd", with_keyset=True)
    rule = batched(overload, vmap) if vmap else unbatched(overload)
    torch.library.register_vmap(name, rule, lib=_library)
    if ordered:
        order(overload, _library)
    return overload


def _register_fake(name: str, fake: Callable[..., Any]) -> None:
    """Register ``fake`` as ``torch.library.register_fake`` does, but read no source file."""
    code = inspect.unwrap(fake).__code__
    entry = torch._library.simple_registry.singleton.find(name)
    entry.fake_impl.register(fake, f"{code.co_filename}:{code.co_firstlineno}", _library)


def _kind(tensor: torch.Tensor) -> str:
    name = type(tensor).__name__
    return f"a symbolic {name}" if is_symbolic(tensor) else f"an ordinary {name}"


def needs_op(*tensors: Any) -> bool:
    """Return True if a call has to take its registered op.

    It has to under modes and traces, and for a tensor without memory: the dispatcher has to provide
    its values first (pending, zero, fake and functorch tensors).
    """
    return is_compiling() or active() or not all(map(has_memory, tensors))


def traced(
    collective: str, use_calc_stream: bool, sync_op: bool, ring_id: int = 0, **tensors: Any
) -> bool:
    """Return True if ``needs_op``; raise the errors of an eager call.

    ``tensors``: the arguments by name. None is skipped; ``out`` must be writable.
    """
    if is_compiling():
        _check_async(collective, use_calc_stream, sync_op)
        return True
    needed = active()
    for role, tensor in tensors.items():
        if tensor is not None:
            needed = needed or not has_memory(tensor)
        elif role == "x":
            needed = True  # the check below raises
    if needed:
        _check_traced(collective, ring_id, tensors)
        _check_async(collective, use_calc_stream, sync_op)
    return needed


def _check_traced(collective: str, ring_id: int, tensors: dict[str, Any]) -> None:
    """Reject tensors that a registered op does not support, before it is called."""
    ring = comm(ring_id)
    for role, tensor in tensors.items():
        if role != "out" and (tensor is not None or role == "x"):
            check_tensor(ring, collective, role, tensor)
    out = tensors.get("out")
    if out is not None:
        _check_traced_out(ring, collective, out, tensors.get("x", out))
    if ring._open_group is not None:
        ring._open_group.expect_op()


def _check_traced_out(
    ring: CommContext, collective: str, out: torch.Tensor, x: torch.Tensor
) -> None:
    """Reject an ``out`` that the result of a registered op can't be copied to."""
    check_out(ring, collective, out)
    if is_symbolic(out) is not is_symbolic(x):
        raise ArgumentError(
            f"{ring._describe(collective)}: out is {_kind(out)} and x is {_kind(x)}; expected both "
            f"from one mode or transform; omit out="
        )
    if ring._open_group is not None:
        raise ArgumentError(
            f"{ring._describe(collective)}: out inside ring.group() where a mode or a trace is "
            f"active: "
            f"out would be filled before the group is launched; leave the mode, or make the call "
            f"outside of the group"
        )


def registered(
    collective: str,
    x: torch.Tensor,
    ring_id: int,
    out: torch.Tensor | None,
    use_calc_stream: bool,
    sync_op: bool,
) -> bool:
    """Return True if a call has to take its registered op: if ``traced``, or for a gradient."""
    if is_compiling():
        return traced(collective, use_calc_stream, sync_op)
    needed = (
        depth() > 0
        or is_tracing()
        or forward_ad._current_level >= 0
        or not has_memory(x)
        or not (out is None or out is x or has_memory(out))
    ) and traced(collective, use_calc_stream, sync_op, ring_id, x=x, out=out)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return needed
    ring = checked(collective, x, ring_id)  # before the dispatcher rejects the device
    _check_async(collective, use_calc_stream, sync_op)
    needs_result(ring, collective)
    if out is not None:
        raise ArgumentError(
            f"{ring._describe(collective)}: out= of shape {tuple(out.shape)} and {out.dtype} with "
            f"an x that requires grad: no gradient can flow through out; pass x.detach(), or leave "
            f"out= away"
        )
    return True


def _check_async(collective: str, use_calc_stream: bool, sync_op: bool) -> None:
    if use_calc_stream and not sync_op:
        raise ArgumentError(
            f"{collective}: sync_op=False with use_calc_stream=True: a call on the caller's own "
            f"stream is already ordered, so there is nothing to wait for; "
            f"pass use_calc_stream=False"
        )


def checked(collective: str, x: torch.Tensor, ring_id: int) -> CommContext:
    """Return the ring after checking that ``x`` is a readable tensor on its device."""
    ring = comm(ring_id)
    check_tensor(ring, collective, "x", x)
    return ring


def like(x: torch.Tensor) -> torch.Tensor:
    """Return a new dense tensor of the shape of ``x``."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def raw_output(ring: CommContext, make: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Allocate the output of an unfenced call, which writes it on the ring's stream.

    An allocation on the current stream could reuse memory that its queued kernels still access.
    """
    if needs_op() or ring.stream is None or capturing():  # registered ops and captures are fenced
        return make(*args)
    calc = torch.cuda.current_stream(ring.device)
    with torch.cuda.stream(ring.stream):
        out = make(*args)
    out.record_stream(calc)  # the program reads it on that stream
    return out


def deliver(result: torch.Tensor, out: torch.Tensor | None, sync_op: bool) -> torch.Tensor | Work:
    """Return the result of a registered op as the eager call does: in ``out``, or as Work."""
    if out is not None:
        if out.dtype != result.dtype:
            raise DtypeError(f"out is {out.dtype}; expected {result.dtype}, the dtype of x")
        if out.numel() != result.numel():
            raise ShapeError(f"out has shape {tuple(out.shape)}; expected {tuple(result.shape)}")
        result = out.copy_(result.view(out.shape))
    return result if sync_op else Work(result)


def save(*indices: int) -> Callable[..., None]:
    """Return a ``setup`` that saves the plain arguments at ``indices`` as ``ctx.saved``.

    A tensor must be saved by ``ctx.save_for_backward`` in a ``setup`` of the operator.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.saved = tuple(inputs[index] for index in indices)
        if any(isinstance(one, torch.Tensor) for one in ctx.saved):
            raise TypeError(f"save{indices} names a tensor; pass setup= with ctx.save_for_backward")

    return setup


def once(collective: str) -> Callable[..., None]:
    """Return a backward that raises: autograd would otherwise drop this gradient silently."""

    def fail(ctx: Any, *grads: object) -> None:
        raise ArgumentError(f"the gradient of {collective} has no gradient")

    return fail


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
