"""gradients="accumulate": the weights to whose `.grad` a backward adds its gradients itself."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch

from commlib.graph.backends.side_stream import SideStream
from commlib.graph.calls.tensor_addresses import layout_guards
from commlib.graph.replaying.nodes import certainly_run, will_run
from commlib.streams import current_raw

Edges = Sequence[tuple[Any, int]]
_dtype, _requires_grad = attrgetter("dtype"), attrgetter("requires_grad")


class GradSums:
    """Finds weights whose gradients may be added by one kernel for all.

    Torch has an autograd node for each weight, which adds a fresh tensor to ``.grad``. The kernel
    takes that over where no hook of the weight would see the tensor. The node is still called,
    without a gradient, and so are the hooks before and after it, which torch does not show. It must
    belong to one of the two streams that a backward is ordered with: it adds what the weight gets
    in other ways.
    """

    def __init__(
        self, weights: Sequence[torch.Tensor], nodes: Sequence[Any], side: SideStream | None
    ) -> None:
        """Store the weights and their nodes; ``side``: that of the captured calls, on a GPU."""
        self._weights, self._side = weights, side
        self._ordered = [side is None] * len(weights)
        if side is not None:
            handles = [
                node.register_prehook(partial(self._note, i)) for i, node in enumerate(nodes)
            ]
            self._handles: list[Any] = handles
        self._guards: Any = None  # of the last gradients of which all were added to
        self._dtypes: list[torch.dtype] = []  # of the weights then
        self._apart: list[int] = []  # addresses with which no two of those share memory

    def _note(self, i: int, _: object) -> None:
        """Note the stream of a node, which torch shows in its hooks alone."""
        assert self._side is not None
        self._handles[i].remove()
        self._ordered[i] = self._side.orders(current_raw(self._side.stream.device.index))

    def at(self, edges: Edges, side: SideStream | None) -> dict[int, torch.Tensor]:
        """Return, by position of the edge, the ``.grad`` that a gradient may be added to.

        Args:
            edges: To the nodes of the tensors of a call, those of the weights last.
            side: The current stream, if that is not the caller's.
        """
        if not edges or side is not self._side:
            return {}
        first = len(edges) - len(self._weights)
        grads: list[Any] = [weight.grad for weight in self._weights]
        if self._are_as_before(grads) and certainly_run(edges[first:]):
            return dict(enumerate(grads, first))
        targets = {
            i: grad
            for i, weight in enumerate(self._weights, first)
            if self._ordered[i - first]
            and (grad := weight.grad) is not None
            and _only_adds(weight, grad)
            and will_run(edges[i][0])
        }
        if not _are_apart(targets.values()):
            return {}
        if targets and len(targets) == len(self._weights):
            self._guards, self._dtypes = layout_guards(grads), [*map(_dtype, self._weights)]
        return targets

    def _are_as_before(self, grads: Sequence[Any]) -> bool:
        """Return True if all gradients may be added to, which takes a third of asking each."""
        if self._guards is None or not self._guards.check(*grads):
            return False  # one has another type, dtype, size or stride, or there is none
        weights: Sequence[Any] = self._weights
        hooks = [x._backward_hooks or x._post_accumulate_grad_hooks for x in weights]
        if any(hooks) or any(map(_requires_grad, grads)) or [*map(_dtype, weights)] != self._dtypes:
            return False
        pointers = [grad.data_ptr() for grad in grads]
        if pointers != self._apart:
            if not _are_apart(grads):
                return False
            self._apart = pointers
        return True


def _only_adds(weight: Any, grad: torch.Tensor) -> bool:
    """Return True if torch would add another gradient in place, and show it to no hook."""
    if type(grad) is not torch.Tensor or grad.layout is not torch.strided or grad.requires_grad:
        return False
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    plain = grad.dtype is weight.dtype and not (grad.is_conj() or grad.is_neg())
    dense = grad.is_contiguous() or (
        grad.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last)
    )
    return plain and dense and not hooks


def _are_apart(grads: Iterable[torch.Tensor]) -> bool:
    """Return True for dense tensors of which no two share memory: one kernel writes to all."""
    spans = sorted((grad.data_ptr(), grad.nbytes) for grad in grads)
    return all(first + size <= then for (first, size), (then, _) in pairwise(spans))


NO_SUMS = GradSums((), (), None)
