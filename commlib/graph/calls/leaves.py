"""Leaves of the autograd graph: those of a run, and those that replace a call's tensors."""

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from commlib.errors import GraphError
from commlib.graph.operators.step import without_autocast
from commlib.graph.watching.recorder import Recorder

Tensors = list[torch.Tensor]


def gradients(
    outs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    *,
    quiet: Sequence[torch.Tensor],
    keep: bool = True,
    create: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of ``wanted``.

    Args:
        outs: What they are derived from.
        wanted: Leaves that replace arguments, and those of the program.
        grads: The gradients of ``outs``.
        quiet: Those whose hooks are not called: the backward that continues to them does so. The
            hooks of a leaf that replaces an argument are the function's.
        keep: Whether the autograd graph is kept.
        create: Whether the gradients have gradients themselves.
    """
    with _without_hooks(quiet):
        return torch.autograd.grad(
            outs, wanted, grads, retain_graph=keep or create, create_graph=create, allow_unused=True
        )


def plain_gradients(
    outs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    *,
    quiet: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of an eager backward that is called outside any autocast."""
    with without_autocast():
        return gradients(outs, wanted, grads, quiet=quiet)


@contextmanager
def _without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    retained = [(x, x.grad) for x in tensors if x.retains_grad]
    hooks = [x._backward_hooks for x in tensors if x._backward_hooks]
    copies = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, copy in zip(hooks, copies, strict=True):
            each.update(copy)
        for tensor, grad in retained:
            tensor.grad = grad


@contextmanager
def noting_histories(tensors: Sequence[torch.Tensor]) -> Iterator[set[int]]:
    """Yield the positions of tensors whose history a backward in a ``with`` block goes through."""
    positions = set[int]()

    def note(i: int, _: object) -> None:
        positions.add(i)

    nodes = [(i, x.grad_fn) for i, x in enumerate(tensors) if x.grad_fn is not None]
    handles = [node.register_prehook(partial(note, i)) for i, node in nodes]
    try:
        yield positions
    finally:
        for handle in handles:
            handle.remove()


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf with the memory of a tensor that requires grad, else the tensor itself.

    That of a ``Parameter`` is one too. What the program has set on the tensor is on the leaf.
    """
    if not tensor.requires_grad:
        return tensor
    new = tensor.detach().requires_grad_()
    if issubclass(type(tensor), torch.nn.Parameter):  # detached, it is a plain tensor
        new.__class__ = type(tensor)
    new.__dict__.update(tensor.__dict__)
    return new


def with_grads(leaves: Tensors, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Copy the ``grad`` of a call's tensors to the leaves that replace them."""
    for new, tensor in zip(leaves, tensors, strict=True):
        if new is not tensor and tensor.is_leaf and new.requires_grad:
            new.grad = tensor.grad
    return leaves


def without_grads(leaves: Tensors, tensors: Sequence[torch.Tensor]) -> None:
    """Clear the ``grad`` that ``with_grads`` has set."""
    for new, tensor in zip(leaves, tensors, strict=True):
        if new is not tensor and new.is_leaf:
            new.grad = None


def parameters(recorder: Recorder, inputs: Sequence[torch.Tensor]) -> Tensors:
    """Return the leaves that require grad and that a run has read in addition to its inputs."""
    input_ids = {id(tensor) for tensor in inputs}
    return [tensor for tensor in recorder.known_leaves() if id(tensor) not in input_ids]


def nodes_of(outs: Iterable[torch.Tensor]) -> set[Any]:
    """Return the nodes that a backward from ``outs`` goes through."""
    nodes: set[Any] = set()
    left = [out.grad_fn for out in outs]
    while left:
        node = left.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            left += [before for before, _ in node.next_functions]
    return nodes


def leaves_of(outs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves that gradients of ``outs`` flow to."""
    return [node.variable for node in nodes_of(outs) if type(node).__name__ == "AccumulateGrad"]


def check_backwards(
    inputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], histories: Set[int]
) -> None:
    """Raise ``GraphError`` for a backward inside the function that leads to an argument.

    ``histories``: positions of arguments through whose history one went in the first call.
    """
    for i, (new, tensor) in enumerate(zip(inputs, tensors, strict=True)):
        before = tensor.grad if tensor.is_leaf else None
        if i in histories or (new is not tensor and new.grad is not before):
            raise GraphError(
                f"a backward inside the function leads to argument tensor {i}, or to what it was "
                f"computed from, but a replay would not add to its gradient; pass x.detach(), or "
                f"return its gradient"
            )


def source_of(leaf: torch.Tensor, given: Sequence[torch.Tensor]) -> int | None:
    """Return the position of the tensor that a leaf is, or is a view of; None for other memory.

    Of several in one memory it is the one that the gradient of the leaf flows to.
    """
    key, end = leaf.untyped_storage()._cdata, None
    matches = [i for i, x in enumerate(given) if x.untyped_storage()._cdata == key]
    if len(matches) > 1:
        node = leaf.grad_fn
        while node is not None and len(node.next_functions) == 1:
            node = node.next_functions[0][0]
        end = getattr(node, "variable", None)
    matches.sort(key=lambda i: (given[i] is not leaf, given[i] is not end))
    return matches[0] if matches else None
