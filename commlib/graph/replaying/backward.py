"""One captured backward of a slot, for those outputs whose gradients come."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import nullcontext

import torch

from commlib.core.tensors import is_wrapper, parts, rebuilt
from commlib.graph.backends.graph_memory import shared
from commlib.graph.backends.side_stream import SideStream
from commlib.graph.calls.output_guard import OutputGuards
from commlib.graph.operators.layout import expanded_dims, maker, unexpanded
from commlib.graph.recording.segments import Segments


class Backward:
    """A graph from the gradients of outputs to those of tensors, and the memory at both ends.

    Attributes:
        guards: Of the gradients that it has lent to the program.
    """

    def __init__(
        self,
        segments: Segments,
        given: Sequence[torch.Tensor],
        grads: dict[int, torch.Tensor],
        *,
        last: bool,
        borrow: bool,
    ) -> None:
        """Store the graph.

        Args:
            segments: What is replayed.
            given: Where it reads the gradients of outputs.
            grads: What it writes, by position of the tensor whose gradient it is.
            last: Whether no other backward can follow, but for one with ``retain_graph=True``.
            borrow: Whether it returns the memory that it writes, if only one gradient uses it.
        """
        self.last = last
        self.segments, self.given = segments, given
        self._expanded = [expanded_dims(x) for x in given]
        self._any_expanded = any(self._expanded)
        self._places = [unexpanded(x, dims) for x, dims in zip(given, self._expanded, strict=True)]
        self._at_once = bool(given) and not any(map(is_wrapper, given))
        self._borrowed = _alone(grads, segments) if borrow else {}
        self.guards = OutputGuards("gradient")
        copied = {i: grad for i, grad in grads.items() if i not in self._borrowed}
        self._wrapped = copied if any(map(is_wrapper, copied.values())) else {}
        self._make = {} if self._wrapped else {i: maker(grad) for i, grad in copied.items()}
        # Each replay's gradients are copied at once, so that their memory is the pool's again.
        self._parts = {
            i: [shared(x) if _is_made(x, segments) else x for x in parts(grad)]
            for i, grad in copied.items()
        }
        self._all_parts = [x for each in self._parts.values() for x in each]

    def run(
        self,
        coming: Sequence[torch.Tensor],
        side: SideStream | None,
        sums: Mapping[int, torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """Replay it with the gradients of outputs; returns those of tensors, by position.

        Args:
            coming: The gradients of outputs.
            side: The current stream, if that is not the caller's.
            sums: By position, what gradients are added to. These are not returned.
        """
        added = {i: into for i, into in sums.items() if i in self._make} if sums else {}
        fresh, places = self._fresh(added)
        sources = [x for i in fresh for x in self._parts[i]] if added else self._all_parts
        with self.segments.lock, nullcontext() if side is None else side.run_on_callers():
            self.segments.turn()
            self._take(coming)
            self.segments.replay()
            if places:
                torch._foreach_copy_(places, sources)
            if added:
                torch._foreach_add_([*added.values()], [self._parts[i][0] for i in added])
        for i, grad in self._borrowed.items():
            fresh[i] = self.guards.borrow(i, grad, "its backward")
        return fresh

    def _take(self, coming: Sequence[torch.Tensor]) -> None:
        """Copy the gradients of outputs to where the graph reads them."""
        grads = [*coming]
        if self._any_expanded:
            grads = [unexpanded(x, dims) for x, dims in zip(coming, self._expanded, strict=True)]
        if self._at_once and all(grad.layout is torch.strided for grad in grads):
            torch._foreach_copy_(self._places, grads)  # a kernel; a memcpy takes 20 µs more
            return
        for buffer, grad in zip(self._places, grads, strict=True):
            buffer.copy_(grad)

    def _fresh(self, added: Container[int]) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
        """Return new gradients by position, but for ``added``, and all memory to be written."""
        if not self._wrapped:
            make = {i: x for i, x in self._make.items() if i not in added} if added else self._make
            plain = {i: new() for i, new in make.items()}
            return plain, [*plain.values()]
        fresh = {i: rebuilt(grad, torch.empty_like) for i, grad in self._wrapped.items()}
        return fresh, [part for grad in fresh.values() for part in parts(grad)]


def _is_made(x: torch.Tensor, segments: Segments) -> bool:
    """Return True for plain values in memory that a graph has made."""
    is_plain = x.layout is torch.strided and not (x.is_conj() or x.is_neg())
    return is_plain and segments.has_made(x)


def _alone(grads: dict[int, torch.Tensor], segments: Segments) -> dict[int, torch.Tensor]:
    """Return the gradients in memory that a graph writes, and that no other gradient has.

    The program may write to each of them: of two sums both gradients are often one tensor, and a
    function's own backward may return what belongs to the program.
    """
    shared = Counter(x.untyped_storage()._cdata for grad in grads.values() for x in parts(grad))
    return {
        i: grad
        for i, grad in grads.items()
        if not is_wrapper(grad)
        and segments.has_made(grad)
        and shared[grad.untyped_storage()._cdata] == 1
    }
