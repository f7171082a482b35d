"""Tensors that require grad as in an eager call, though no replay has a gradient for them."""

from collections.abc import Sequence
from typing import Any

import torch

from commlib.errors import GraphError

_NOWHERE = torch.empty(0, device="cpu", requires_grad=True)


def no_gradient(tensor: torch.Tensor, name: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensor as a result of a node that raises ``GraphError`` in a backward.

    Args:
        tensor: It does not require grad.
        name: What the function has bound to it.
        sources: What gradients would flow to, if that is known. A backward calls only nodes on the
            way to what it derives by.
    """
    with torch.enable_grad():
        result: torch.Tensor = _NoGradient.apply([tensor], name, *(sources or [_NOWHERE]))  # type: ignore[no-untyped-call]
    return result


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensors: list[torch.Tensor], name: str, *_: torch.Tensor) -> torch.Tensor:
        """Return the only one of ``tensors``: an argument itself would be returned as a view."""
        ctx.name = name
        return tensors[0]

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Raise."""
        raise GraphError(
            f"the function binds {ctx.name} to a tensor that requires grad, and a replay has no "
            f"gradient for it; return the tensor too, and use what the call returns in the loss"
        )
