"""Where gradients end: the leaves that a run has, and those that stand for a call's tensors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from commlib.graph.ledger import Ledger
from commlib.graph.step import without_autocast

Tensors = list[torch.Tensor]


def gradients(
    outs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of ``wanted``, and keep the autograd graph.

    Hooks of leaves are left out: the backward that goes on from here to the leaves calls them.
    """
    with _without_hooks(wanted):
        return torch.autograd.grad(outs, wanted, grads, retain_graph=True, allow_unused=True)


def plain_gradients(
    outs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients as an eager backward has them that is called outside any autocast."""
    with without_autocast():
        return gradients(outs, wanted, grads)


@contextmanager
def _without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    retained = [(x, x.grad) for x in tensors if x.retains_grad]
    hooks = [x._backward_hooks for x in tensors if x._backward_hooks]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, were in zip(hooks, kept, strict=True):
            each.update(were)
        for tensor, grad in retained:
            tensor.grad = grad


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf over the memory of a tensor that wants a gradient, else the tensor."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def with_grads(leaves: Tensors, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Return leaves that stand for a call's tensors with the ``grad`` that these have."""
    for new, tensor in zip(leaves, tensors, strict=True):
        if new is not tensor and tensor.is_leaf and new.requires_grad:
            new.grad = tensor.grad
    return leaves


def without_grads(leaves: Tensors, tensors: Sequence[torch.Tensor]) -> None:
    """Let go of what ``with_grads`` has given."""
    for new, tensor in zip(leaves, tensors, strict=True):
        if new is not tensor and new.is_leaf:
            new.grad = None


def parameters(ledger: Ledger, inputs: Sequence[torch.Tensor]) -> Tensors:
    """Return the leaves that a run has read beside its inputs and that want a gradient."""
    given = {id(tensor) for tensor in inputs}
    return [tensor for tensor in ledger.known_leaves() if id(tensor) not in given]
