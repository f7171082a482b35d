"""Counts of writes to tensors: a call increases them, and a replay would not."""

from collections.abc import Sequence

import torch

from commlib.core.tensors import parts
from commlib.graph.operators.history import is_leaf
from commlib.graph.operators.schema import memory
from commlib.graph.replaying.compare import Difference
from commlib.graph.watching.effects import Effects


class WriteCounts:
    """Counts of writes to tensors and their gradients, before a call of the function."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        leaves = [x for x in tensors if x.requires_grad and is_leaf(x)]
        self._grads = [(leaf, leaf.grad) for leaf in leaves]
        grads = (grad for _, grad in self._grads if grad is not None)
        held = [part for x in (*tensors, *grads) for part in parts(x)]
        self._tensors = [x for x in held if not x.is_inference()]
        self._versions = [x._version for x in self._tensors]

    def missed(self, effects: Effects, parts: Sequence[Effects]) -> Difference | None:
        """Return what the call has changed and no replay would, if anything.

        ``effects``: what the graph changes; ``parts``: what its eager parts do.
        """
        covered = {memory(x) for each in (effects, *parts) for x in each.tensors}
        pairs = zip(self._tensors, self._versions, strict=True)
        for tensor, version in pairs:
            if tensor._version == version or memory(tensor) in covered:
                continue
            if tensor.untyped_storage().nbytes():  # what the function has emptied holds nothing
                text = f"a {tuple(tensor.shape)} {tensor.dtype} tensor from outside"
                detail = "is written by the function, and not by the graph"
                return Difference(("missed", 0), text, detail)
        leaves = {id(leaf) for each in (effects, *parts) for leaf in each.leaves}
        for leaf, grad in self._grads:
            if leaf.grad is not grad and id(leaf) not in leaves:
                text = f"grad of a {tuple(leaf.shape)} tensor"
                return Difference(
                    ("missed", 1),
                    text,
                    "is another one after the function, and not after the graph",
                )
        return None
