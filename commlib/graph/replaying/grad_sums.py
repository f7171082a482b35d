"""gradients="accumulate": the weights to whose `.grad` a backward adds its gradients itself."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from commlib.graph.backends.side_stream import SideStream
from commlib.graph.replaying.nodes import will_run
from commlib.streams import current_raw

Edges = Sequence[tuple[Any, int]]


class GradSums:
    """Finds weights whose gradients may be added by one kernel for all.

    Torch has an autograd node for each weight, which adds a fresh tensor to ``.grad``. The kernel
    takes that over where nothing else would see the tensor: no hook of the weight gets it. The node
    is still called, without a gradient, and so are the hooks after it. It must belong to one of the
    two streams that a backward is ordered with: it adds what the weight gets in other ways.
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
        found = {
            i: grad
            for i, weight in enumerate(self._weights, first)
            if self._ordered[i - first]
            and (grad := weight.grad) is not None
            and _only_adds(weight, grad)
            and will_run(edges[i][0])
        }
        return found if len({*map(id, found.values())}) == len(found) else {}


def _only_adds(weight: Any, grad: torch.Tensor) -> bool:
    """Return True if torch would add another gradient in place, and show it to no hook."""
    plain = type(grad) is torch.Tensor and grad.layout is torch.strided
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return plain and not hooks and grad.dtype is weight.dtype and not grad.requires_grad


NO_SUMS = GradSums((), (), None)
