"""Eager parts: functions that stay outside any graph, and are called between two of them."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from commlib.core import observers
from commlib.errors import GraphError
from commlib.graph.calls.key_values import value
from commlib.graph.watching.runs import DonePart, EagerPart, current, do_again, name_of

F = TypeVar("F", bound=Callable[..., Any])
_PLAIN = (bool, int, float, complex, str, type(None))  # what a program computes with
_marked: "weakref.WeakSet[Callable[..., Any]]" = weakref.WeakSet()


def eager(fn: F) -> F:
    """Mark a function that must stay outside any graph; usable as a decorator.

    A capture ends before the function, and a new graph begins after it. The function runs eagerly
    between them. It may read values on the host, and branch. Outside a capture nothing changes.

    Args:
        fn: The function. At each call it must return tensors of the same shapes and dtypes, and the
            same plain values. No gradient flows through it.

    Returns:
        A function with the same signature.
    """

    @functools.wraps(fn)
    def outside(*args: Any, **kwargs: Any) -> Any:
        run = current()
        if run is not None:
            return run.eager_part(functools.partial(fn, *args, **kwargs))
        if observers.observers and observers.refusing():
            raise GraphError(f"{fn.__qualname__} is an eager part, and runs in a backward")
        return fn(*args, **kwargs)

    _marked.add(outside)
    return outside  # type: ignore[return-value]  # the same signature


def is_eager(fn: Callable[..., Any]) -> bool:
    """Return True if a function, or the forward of a module, was marked with ``eager``."""
    return getattr(type(fn), "forward", fn) in _marked or fn in _marked


class EagerSegment:
    """An eager part: called at every replay, its tensors copied to where the graph reads them."""

    nodes = nbytes = 0
    reads: str | None = None

    def __init__(
        self,
        part: EagerPart,
        result: Any,
        grads: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    ) -> None:
        """Store the part.

        Args:
            part: The marked function with its arguments.
            result: What it returned in the capture.
            grads: Leaves, and the gradients that the graphs before it leave them.
        """
        self._part, self._grads = part, grads
        self._kept = tree_leaves(result)

    def replay(self, done: list[DonePart] | None = None) -> None:
        """Call it again, or do again what the first of ``done`` did in a verified call.

        Raises:
            GraphError: The graph can't take what it returns.
        """
        for leaf, grad in self._grads:
            if leaf.grad is not grad:
                leaf.grad = grad
        with torch.no_grad():
            found = tree_leaves(self._part() if done is None else do_again(done, self._part))
            if list(map(_shape, found)) != list(map(_shape, self._kept)):
                raise GraphError(
                    f"{name_of(self._part)}, an eager part, returns something else than at the "
                    f"capture, where the graph has its shapes and plain values; return tensors of "
                    f"one shape and dtype, or nothing, or make the values part of key="
                )
            for kept, new in zip(self._kept, found, strict=True):
                if isinstance(kept, torch.Tensor) and kept is not new:
                    kept.copy_(new)

    def release(self) -> None:
        """Keep nothing."""
        self._kept, self._grads = [], []


def _shape(x: Any) -> Any:
    """Return the properties of an eager part's result that a graph has fixed."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype, x.device
    return value(x) if isinstance(x, _PLAIN) else type(x)
