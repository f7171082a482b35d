"""Modes of this thread that trace or watch operators; they are given registered ops."""

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from commlib.core.observers import observers
from commlib.core.ring import Ring
from commlib.core.tensors import has_memory, is_symbolic
from commlib.errors import ArgumentError

# Asked at every call, hence one C function each: how many dispatch modes are active, and whether
# torch.jit.trace is. If both say no, and no forward-mode level is open, nothing below can be true.
depth = getattr(
    torch._C, "_len_torch_dispatch_stack", lambda: len(_get_current_dispatch_mode_stack())
)
is_tracing = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)
_OPS = {"exchange_rows": "global_scatter"}  # collectives that no operator is named after


def watched() -> bool:
    """Return True under a dispatch mode that is not an observer of ours, and in torch.jit.trace."""
    return bool((depth() and _foreign()) or is_tracing())


def active() -> bool:
    """Return True under a dispatch mode, in torch.jit.trace, or inside forward-mode autograd."""
    return watched() or forward_ad._current_level >= 0


def check_untraced(ring: Ring, collective: str, *tensors: torch.Tensor | None) -> None:
    """Raise ``ArgumentError`` for a ring's own collective that a mode or a trace would miss."""
    symbolic = None
    for tensor in tensors:
        if tensor is not None and not has_memory(tensor) and is_symbolic(tensor):
            symbolic = tensor
    if symbolic is None and not watched():
        return
    modes = _foreign()
    mode_name = type(modes[-1]).__name__ if modes else "torch.jit.trace" if is_tracing() else None
    under = f"under {mode_name}" if mode_name else f"with a symbolic {type(symbolic).__name__}"
    op = f"commlib.ops.{_OPS.get(collective, collective)}"
    raise ArgumentError(
        f"{ring._describe(collective)}: a ring's own collective writes to out without a torch "
        f"operator, so "
        f"that a call {under} would not be traced; call {op}(..., ring_id={ring.ring_id}), which "
        f"is a registered op"
    )


def _foreign() -> list[Any]:
    """Return the active dispatch modes, innermost last, without our own observers."""
    stack: list[Any] = _get_current_dispatch_mode_stack()
    return [mode for mode in stack if all(mode is not observer for observer in observers)]
