"""A call from a thread of autograd, on a CPU too: torch goes on in one where backwards are nested.

On a GPU each backward runs in such a thread, while the thread that has begun it waits.
"""

from collections.abc import Callable
from typing import Any

import torch

_DEPTH = 65  # torch goes on in another thread where a backward is the 60th inside of others


class _Deep(torch.autograd.Function):
    """A backward that goes back again, and that makes a call at the end."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None], depth: int) -> torch.Tensor:
        ctx.call, ctx.depth = call, depth
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.depth:
            _go_back(ctx.call, ctx.depth - 1)
        else:
            ctx.call()
        return grad * 2, None, None


def _go_back(call: Callable[[], None], depth: int) -> None:
    with torch.enable_grad():  # a backward has turned it off
        x = torch.ones(1, requires_grad=True)
        _Deep.apply(x, call, depth).backward()  # type: ignore[no-untyped-call]


def by_autograd(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns in a thread of autograd that works for this one."""
    results: list[Any] = []
    _go_back(lambda: results.append(call()), _DEPTH)
    return results[0]
