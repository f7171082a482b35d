"""The one autograd node of a captured forward: its backward replays a graph."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from commlib.core import observers
from commlib.errors import GraphError
from commlib.graph.backends.side_stream import SideStream
from commlib.graph.calls.leaves import Tensors
from commlib.graph.operators.unsupported import check_earlier_backward, check_untransformed_backward
from commlib.graph.recording.capture_run import has_saved_hooks, without_saved_hooks
from commlib.graph.replaying.nodes import all_run, retains

Grads = Sequence[torch.Tensor | None]
_TIE = torch.empty(0, device="cpu")


class Lease:
    """Held by the node of one forward: the forward's slot is free when it is gone.

    Attributes:
        side: The stream of the node; None if the node belongs to the caller's stream.
        expected: Of a verified call, outputs of the function itself, and what gradients are wanted
            of.
        uncaptured: Whether the forward was verified with the answer "not captured".
    """

    __slots__ = ("__weakref__", "_reads", "_versions", "expected", "side", "uncaptured")

    def __init__(self, side: SideStream | None) -> None:
        self.side = side
        self.expected: tuple[Tensors, Tensors] | None = None
        self.uncaptured = False
        self._reads: Tensors = []
        self._versions: list[int] = []

    def note(self, reads: Tensors) -> None:
        """Note how often each tensor that the backward reads has been written to."""
        self._reads, self._versions = reads, [tensor._version for tensor in reads]

    @property
    def is_written(self) -> bool:
        """Return True if one of these tensors has been written to since."""
        return [tensor._version for tensor in self._reads] != self._versions


class Slot(Protocol):
    """Interface between an autograd node and the graphs that it replays."""

    is_last: bool  # no other backward can follow the one that ran last

    def not_differentiable(self, borrowed: Sequence[torch.Tensor]) -> Tensors:
        """Return the outputs that no gradient comes back through."""

    def check(self, lease: Lease) -> None:
        """Raise ``GraphError`` where something was written to that the backward is to read."""

    def backward(
        self, grads: Grads, side: SideStream | None, edges: Sequence[tuple[Any, int]] = ()
    ) -> list[torch.Tensor | None]:
        """Replay the backward with the gradients of the outputs; returns fresh tensors.

        ``edges``: to the nodes that these go to, if the slot may do the work of such nodes.
        """

    def verified_backward(self, lease: Lease, grads: Grads) -> list[torch.Tensor | None]:
        """Run the backward of the function's own outputs, then replay the captured one."""


class Node(torch.autograd.Function):
    """The node; ``apply`` gets the slot, the lease, the outputs, and what leads to gradients."""

    @staticmethod
    def forward(
        ctx: Any, slot: Slot, lease: Lease, borrowed: list[torch.Tensor], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs, as results of the node, and one more that leads to it: ``tie``."""
        ctx.slot, ctx.lease = slot, lease
        ctx.set_materialize_grads(False)
        others = slot.not_differentiable(borrowed)
        if others:
            ctx.mark_non_differentiable(*others)
        tie = _TIE.detach()
        ctx.save_for_backward(tie)  # of an output without a reference cycle
        return *borrowed, tie

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of all that leads to some."""
        *coming, _ = grads  # the tie has no gradient
        check_untransformed_backward(coming)
        if observers.observers and observers.refusing():
            check_earlier_backward()
        if not torch.is_grad_enabled():
            return None, None, None, *_gone_back(ctx, coming, sums=True)
        with torch.no_grad():  # create_graph=True
            in_grads = _gone_back(ctx, coming, sums=False)
        in_grads = _differentiable_once(in_grads, [*ctx.saved_tensors, *coming])
        return None, None, None, *in_grads


# Torch's own ``apply`` in Python looks at each argument for tensors that have left a transform of
# torch.func. A call that has a key contains none of them. The look takes 5 µs for 20 arguments.
_apply: Callable[..., Any] = super(torch.autograd.Function, Node).apply


def apply_node(*args: Any) -> Any:
    """Return the outputs and the tie, which the program's saved-tensor hooks do not get."""
    if not has_saved_hooks():
        return _apply(*args)
    with without_saved_hooks():
        return _apply(*args)


def _differentiable_once(grads: Grads, sources: Grads) -> list[torch.Tensor | None]:
    """Return gradients that raise where something is derived from them: no graph has that.

    ``sources``: what they depend on. A backward calls only nodes on the way to what it derives by.
    """
    defined = [grad for grad in grads if grad is not None]
    marked: Any = _NoSecondDerivative.apply(defined, *sources)  # type: ignore[no-untyped-call]
    each = iter(marked)
    return [None if grad is None else next(each) for grad in grads]


class _NoSecondDerivative(torch.autograd.Function):
    """The node of gradients that have none themselves."""

    @staticmethod
    def forward(
        ctx: Any, grads: list[torch.Tensor], *_: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients, which the program may write to."""
        return tuple(grad.detach() for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Raise."""
        raise GraphError(
            "a captured call has no second derivatives (create_graph=True, gradient penalties); "
            "call the function itself where they are needed"
        )


def _gone_back(ctx: Any, grads: Grads, *, sums: bool) -> list[torch.Tensor | None]:
    """Replay a node's backward, and free its slot if no other backward can follow.

    ``sums``: whether gradients may be added to ``.grad`` at once.
    """
    slot: Slot | None = ctx.slot
    if slot is None:
        raise GraphError(
            "second backward through one call; pass retain_graph=True to the first backward"
        )
    lease: Lease = ctx.lease
    slot.check(lease)
    edges = ctx.next_functions
    if lease.expected is None:
        in_grads = slot.backward(grads, lease.side, edges if sums else ())
    else:
        in_grads = slot.verified_backward(lease, grads)
    if slot.is_last and not retains() and all_run(edges):
        ctx.slot = ctx.lease = None
    return in_grads
