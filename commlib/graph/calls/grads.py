"""Gradients that a captured function reads or makes: more inputs and outputs of each call."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from commlib.core.tensors import is_wrapper, parts
from commlib.graph.calls.cache_key import Arguments, of_tensor


class Grads:
    """The leaves whose ``grad`` a captured function uses, in the order in which they were found."""

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self._known: set[int] = set()
        self._wrapped = False  # whether some are wrappers (DTensor): their parts are given

    def add(self, leaves: Iterable[torch.Tensor]) -> bool:
        """Record more; returns True if there were new ones, with which keys change."""
        before = len(self.leaves)
        for leaf in leaves:
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self.leaves.append(leaf)
                self._wrapped = self._wrapped or is_wrapper(leaf)
        return len(self.leaves) > before

    def extend(self, call: Arguments) -> Arguments:
        """Return ``call`` with the gradients as further tensors; which are None is in its key."""
        grads = [leaf.grad for leaf in self.leaves]
        present = tuple(grad is not None for grad in grads)
        kinds = tuple(map(_kind, grads)) if self._wrapped else present
        tensors = [grad for grad in grads if grad is not None]
        if self._wrapped:
            tensors = [part for grad in tensors for part in parts(grad)]
        return replace(
            call,
            tensors=call.tensors + tensors,
            grads=len(tensors),
            key=(*call.key, kinds),
            owners=[leaf for leaf, each in zip(self.leaves, present, strict=True) if each],
        )


def _kind(grad: torch.Tensor | None) -> Any:
    """Return what tells a gradient from another: of a wrapper, its parts and how it has them."""
    if grad is None or not is_wrapper(grad):
        return grad is not None
    wrapper: Any = grad
    return repr(wrapper.__tensor_flatten__()), tuple(map(of_tensor, parts(grad)))
