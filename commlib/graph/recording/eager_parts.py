"""Eager parts: functions that stay outside any graph, and are called between two of them."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from commlib.core import observers
from commlib.core.tensors import has_memory, parts
from commlib.core.validation import overlaps_itself
from commlib.errors import GraphError
from commlib.graph.calls.key_values import value
from commlib.graph.operators.schema import memory
from commlib.graph.watching.runs import (
    Called,
    DonePart,
    EagerPart,
    current,
    do_again,
    memory_in,
    name_of,
)

F = TypeVar("F", bound=Callable[..., Any])
_PLAIN = (bool, int, float, complex, str, type(None))  # what a program computes with
_marked: "weakref.WeakSet[Callable[..., Any]]" = weakref.WeakSet()


def eager(fn: F) -> F:
    """Mark a function that must stay outside any graph; usable as a decorator.

    A capture ends before the function, and a new graph begins after it. The function runs eagerly
    between them. It may read values on the host, and branch. Outside a capture nothing changes.

    Args:
        fn: The function. At each call it must return tensors of the same shapes and dtypes, and the
            same plain values. A tensor that it returns and has not made itself must be the same one
            at each call, or a copy of it (``clone()``). What it has made and returns belongs to the
            graph, and each replay overwrites it: keep a copy to keep it elsewhere. No gradient
            flows through it.

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
    """An eager part: called at every replay, its tensors copied to where the graph reads them.

    That is the memory of what it made in the capture. What else it returns, such as an argument, is
    read in place: a replay writes to no tensor of the program.

    Attributes:
        result: What it returned in the capture.
        written: Memory that it wrote to in the capture.
    """

    nodes = nbytes = 0
    reads: str | None = None

    def __init__(
        self,
        part: EagerPart,
        called: Called,
        grads: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    ) -> None:
        """Store the part.

        Args:
            part: The marked function with its arguments.
            called: What it did in the capture.
            grads: Leaves, and the gradients that the graphs before it leave them.
        """
        self._part, self._grads, self._own = part, grads, called.own
        leaves, spec = tree_flatten(called.result)
        pairs = zip(leaves, called.own, strict=True)
        self._kept = [_readable(x) if made else x for x, made in pairs]
        self.result, self.written = tree_unflatten(self._kept, spec), called.written

    def made(self, key: int) -> bool:
        """Return True for memory that the part has made, as for its results."""
        pairs = zip(self._kept, self._own, strict=True)
        return any(made and key in memory_in(x) for x, made in pairs)

    def replay(self, done: list[DonePart] | None = None) -> None:
        """Call it again, or do again what the first of ``done`` did in a verified call.

        Raises:
            GraphError: The graph can't take what it returns.
        """
        for leaf, grad in self._grads:
            if leaf.grad is not grad:
                leaf.grad = grad
        with torch.no_grad():
            result = self._part() if done is None else do_again(done, self._part).result
            leaves = tree_leaves(result)
            if list(map(_shape, leaves)) != list(map(_shape, self._kept)):
                raise GraphError(
                    f"{name_of(self._part)}, an eager part, returns something else than at the "
                    f"capture, where the graph has its shapes and plain values; return tensors of "
                    f"one shape and dtype, or nothing, or make the values part of key="
                )
            for saved, new, made in zip(self._kept, leaves, self._own, strict=True):
                if made:
                    saved.copy_(new)
                elif isinstance(saved, torch.Tensor):
                    self._check_same(saved, new, verified=done is not None)

    def _check_same(self, kept: torch.Tensor, new: torch.Tensor, *, verified: bool) -> None:
        """Raise unless the graph reads ``new``; in a verified call a copy of it was returned."""
        if not (_is_same(kept, new) or (verified and _holds_same(kept, new))):
            raise GraphError(
                f"{name_of(self._part)}, an eager part, returns another tensor than at the "
                f"capture, and did not make that one, so that no replay may write to it; return a "
                f"copy of it (clone())"
            )

    def release(self) -> None:
        """Keep nothing."""
        self.result, self._kept, self._own, self._grads = None, [], [], []


def _shape(x: Any) -> Any:
    """Return the properties of an eager part's result that a graph has fixed."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype, x.device
    return value(x) if isinstance(x, _PLAIN) else type(x)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """Return what a part has made itself, in memory that a replay may write to.

    That is a copy of an array, which the program may hold, and of elements that share memory.
    """
    made = [part for part in parts(x) if memory(part)]
    held = any(not part.untyped_storage().resizable() for part in made)
    return x.clone() if held or any(map(overlaps_itself, made)) else x


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True for the same elements in the same memory."""
    pairs = zip(parts(one), parts(other), strict=True)
    return one is other or all(
        has_memory(x) and has_memory(y) and (x.data_ptr(), x.stride()) == (y.data_ptr(), y.stride())
        for x, y in pairs
    )


def _holds_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True for equal elements; NaN equals NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
