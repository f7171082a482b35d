"""The gradient of a registered op: one autograd node, also inside functorch transforms."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

from commlib.errors import ArgumentError

Setup = Callable[..., None]
Backward = Callable[..., Any]

# torch.autograd.Function enters functorch's transforms itself; a kernel is called inside one.
_Node: Any = getattr(torch.autograd.function, "_SingleLevelFunction", torch.autograd.Function)


def kernel(op: Any, setup: Setup | None, backward: Backward) -> Callable[..., Any]:
    """Return the Autograd kernel of ``op``.

    Args:
        op: The overload that is registered. Its schema has no defaults and no keyword arguments.
        setup: Called as ``setup(ctx, inputs, output)`` after the forward.
        backward: Called as ``backward(ctx, *grads)``; returns one gradient or None per argument.

    Returns:
        A function ``(keyset, *args)`` for ``Library.impl(..., with_keyset=True)``. Unlike a kernel
        of ``torch.library.register_autograd`` it supports functorch, and it raises for a tangent
        instead of dropping it.
    """

    def below(args: tuple[Any, ...], keyset: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def forward(ctx: Any, *inputs: Any) -> Any:
        *args, keyset = inputs
        # A node's forward runs without gradients and tangents, but outer transforms need both.
        outer = torch._C._are_functorch_transforms_active()
        with torch.set_grad_enabled(outer), forward_ad._set_fwd_grad_enabled(outer):
            output = below(tuple(args), keyset)
        if setup is not None:
            setup(ctx, tuple(args), output)
        return output

    def back(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (*backward(ctx, *grads), None)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(back)}
    node: Any = type(f"Backward_{op._opname}", (_Node,), methods)

    def differentiable(keyset: Any, *args: Any) -> Any:
        _check_tangents(op, args)
        needs_grad = torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in args
        )
        if not needs_grad:
            return below(args, keyset)
        with _inside_transform():
            return node.apply(*args, keyset)

    return differentiable


@contextmanager
def _inside_transform() -> Iterator[None]:
    """Allow a node at the level of the functorch transform that calls the kernel."""
    functorch = torch._C._functorch
    allowed = functorch.get_single_level_autograd_function_allowed()
    functorch.set_single_level_autograd_function_allowed(True)
    try:
        yield
    finally:
        functorch.set_single_level_autograd_function_allowed(allowed)


def _check_tangents(op: Any, args: tuple[Any, ...]) -> None:
    """Reject forward-mode autograd: its tangent would be dropped."""
    if forward_ad._current_level < 0:
        return
    for x in args:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise ArgumentError(
                f"{op._opname} has no forward-mode derivative (torch.func.jvp, jacfwd, "
                f"forward_ad); use torch.func.vjp, jacrev or backward(), or call it on "
                f"x.detach()"
            )
