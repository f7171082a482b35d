"""One captured backward of a slot, for those outputs whose gradients come."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from commlib.core.tensors import is_wrapper, parts, rebuilt
from commlib.graph.backends.side_stream import SideStream
from commlib.graph.calls.output_guard import Loans
from commlib.graph.operators.layout import elements, maker
from commlib.graph.recording.segments import Segments


class Backward:
    """A graph from the gradients of outputs to those of tensors, and the memory at both ends."""

    def __init__(
        self,
        segments: Segments,
        given: Sequence[torch.Tensor],
        grads: dict[int, torch.Tensor],
        *,
        last: bool,
        lends: bool,
    ) -> None:
        """Know the graph.

        Args:
            segments: What is replayed.
            given: Where it reads the gradients of outputs.
            grads: What it writes, by position of the tensor whose gradient it is.
            last: Whether no other backward can follow, but for one with ``retain_graph=True``.
            lends: Whether it returns the memory that it writes; wrappers are copied even then.
        """
        self.last = last
        self.segments, self.given, self._grads = segments, list(given), grads
        self._plain = not any(is_wrapper(x) or 0 in x.stride() for x in given)
        self._parts = [part for grad in grads.values() for part in parts(grad)]
        self._wrapped = any(map(is_wrapper, grads.values()))
        self._make = {} if self._wrapped else {i: maker(grad) for i, grad in grads.items()}
        self._loans = Loans("gradient") if lends and not self._wrapped else None

    def run(
        self, coming: Sequence[torch.Tensor], side: SideStream | None
    ) -> dict[int, torch.Tensor]:
        """Replay it with the gradients of outputs; returns those of tensors, by position.

        ``side``: the current stream, if that is not the caller's.
        """
        self.expire("the next backward")
        fresh, places = ({}, []) if self._loans is not None else self._fresh()
        with self.segments.lock, nullcontext() if side is None else side.run_on_callers():
            self.segments.turn()
            self._take(coming)
            self.segments.replay()
            if places:
                torch._foreach_copy_(places, self._parts)
        if self._loans is None:
            return fresh
        return {i: self._loans.lend(i, x, "its backward") for i, x in self._grads.items()}

    def _take(self, coming: Sequence[torch.Tensor]) -> None:
        """Copy the gradients of outputs to where the graph reads them."""
        if self._plain and all(grad.layout is torch.strided for grad in coming):
            torch._foreach_copy_(self.given, list(coming))  # a kernel; a memcpy takes 20 µs more
            return
        for kept, grad in zip(self.given, coming, strict=True):
            if 0 in kept.stride():  # expanded, and so is the gradient
                elements(kept).copy_(elements(grad))
            else:
                kept.copy_(grad)

    def expire(self, where: str) -> None:
        """Make gradients that the program still holds raise when they are read."""
        if self._loans is not None:
            self._loans.expire(where)

    def _fresh(self) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
        """Return new gradients by position, and all memory that is to be written."""
        if not self._wrapped:
            plain = {i: make() for i, make in self._make.items()}
            return plain, [*plain.values()]
        fresh = {i: rebuilt(grad, torch.empty_like) for i, grad in self._grads.items()}
        return fresh, [part for grad in fresh.values() for part in parts(grad)]
