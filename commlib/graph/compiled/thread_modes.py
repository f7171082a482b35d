"""Modes of a thread that nodes of an FX graph change: gradients, autocast, levels of torch.func."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_DEVICES = ("cpu", "cuda")


@contextmanager
def restored_modes() -> Iterator[None]:
    """Give the thread its modes back after a ``with`` block, also those that an error leaves.

    Transforms of ``torch.func`` push and pop their levels in separate nodes.
    """
    functorch, autograd = torch._C._functorch, torch._C._autograd
    depth, has_level = functorch.get_dynamic_layer_stack_depth(), _has_dual_level()
    grad, forward = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
    inplace = functorch.get_inplace_requires_grad_allowed()
    disabled = autograd._saved_tensors_hooks_get_disabled_error_message()
    autocast, nesting = _autocast(), _autocast_nesting()
    try:
        with torch._C._PreserveDispatchKeyGuard():
            yield
    finally:
        if _has_dual_level() and not has_level:
            torch._C._exit_dual_level(level=0)
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if depth:  # the level on top has it
            functorch.set_inplace_requires_grad_allowed(inplace)
        torch._C._set_grad_enabled(grad)
        torch._C._set_fwd_grad_enabled(forward)
        _set_disabled_hooks(disabled)
        _set_autocast(autocast, nesting)


def _has_dual_level() -> bool:
    """Return True inside the one level of forward-mode gradients that torch allows."""
    try:
        level: int = torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=level)
    return False


def _set_disabled_hooks(message: str | None) -> None:
    """Disable hooks of saved tensors with a message, or enable them."""
    if message is None:
        torch._C._autograd._saved_tensors_hooks_enable()
    else:
        torch._C._autograd._saved_tensors_hooks_disable(message)


def _autocast() -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in _DEVICES]


def _autocast_nesting() -> tuple[bool, int]:
    """Return whether autocast has a cache, and how many contexts of it are open."""
    torch.autocast_increment_nesting()
    return torch.is_autocast_cache_enabled(), torch.autocast_decrement_nesting()


def _set_autocast(states: list[tuple[bool, torch.dtype]], nesting: tuple[bool, int]) -> None:
    for device, (enabled, dtype) in zip(_DEVICES, states, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    has_cache, depth = nesting
    torch.set_autocast_cache_enabled(has_cache)
    for _ in range(depth, _autocast_nesting()[1]):
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
