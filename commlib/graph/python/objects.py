"""Objects in a result that pytree does not open: their tensors are outputs like all others.

Each replay returns new objects around its tensors, as the function does. Objects on the path to
such a tensor are copied. Objects without tensors are outputs themselves.
"""

import copy
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node

from commlib.core.tensors import is_pending, is_wrapper, parts, rebuilt
from commlib.errors import GraphError
from commlib.graph.python.changes import is_plain
from commlib.graph.python.reach import attributes, is_of_the_program

_MAX_DEPTH = 1000  # of objects in one result
_NESTS = (list, tuple, dict)
_CLOSED = (torch.nn.Module, torch.optim.Optimizer, Iterator, type)


class Unfolded:
    """An object of a result with the tensors and other objects in it; a node of pytree."""

    def __init__(self, whole: Any, leaves: list[Any]) -> None:
        self.whole, self.leaves = whole, leaves


class _Shape:
    """An object without its tensors: equal for objects that differ only in tensors."""

    def __init__(self, unfolded: Unfolded) -> None:
        self.whole, self.leaves = unfolded.whole, unfolded.leaves
        self._facts = repr(_facts(unfolded.whole))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shape) and self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts)

    def __repr__(self) -> str:
        count = sum(isinstance(x, torch.Tensor) for x in self.leaves)
        return f"{type(self.whole).__qualname__} with {count} tensors"


def unfold(x: Any) -> Any:
    """Return an ``Unfolded`` for an object that holds tensors, else ``x`` itself.

    Raises ``GraphError`` for objects that contain themselves.
    """
    if isinstance(x, torch.Tensor):
        return _unwrapped(x)
    if not _is_open(x):
        return x
    leaves = _leaves(x, ())
    if not any(isinstance(one, torch.Tensor) for one in leaves):
        return x
    return Unfolded(x, [*{id(one): one for one in leaves}.values()])


def _unwrapped(x: torch.Tensor) -> Any:
    """Return an ``Unfolded`` for a wrapper (DTensor), else ``x`` itself."""
    held = _parts(x)
    return x if held[0] is x else Unfolded(x, held)


def _parts(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in a wrapper, else ``[x]``; also ``[x]`` for a pending tensor."""
    if not is_wrapper(x) or is_pending(x):
        return [x]
    if x.requires_grad:
        raise GraphError(
            f"an output is a {type(x).__qualname__} that requires grad, and a graph has gradients "
            f"only for the tensors in it; return out.to_local()"
        )
    return parts(x) or [x]


def _is_open(x: Any) -> bool:
    """Return True for containers and objects of the program that are defined by their content."""
    if isinstance(x, (torch.Tensor, *_CLOSED)) or callable(x):
        return False
    if isinstance(x, (*_NESTS, SimpleNamespace)):
        return True
    return is_of_the_program(type(x)) and bool(attributes(x))


def _held(x: Any) -> Mapping[Any, Any]:
    """Return the content of an open object by name or index."""
    if isinstance(x, dict):
        return {**x, **attributes(x)}
    if isinstance(x, list | tuple):
        return dict(enumerate(x))
    return attributes(x)


def _leaves(x: Any, inside: tuple[int, ...]) -> list[Any]:
    """Return the tensors in an object, and the largest objects without one; no plain values."""
    if isinstance(x, torch.Tensor):
        return _parts(x)
    if not _is_open(x):
        return [] if is_plain(x) else [x]
    if id(x) in inside or len(inside) > _MAX_DEPTH:
        raise GraphError(
            f"an output is a {type(x).__qualname__} that holds itself, so that a replay "
            f"can't put new tensors in it; return the tensors themselves"
        )
    leaves = [leaf for one in _held(x).values() for leaf in _leaves(one, (*inside, id(x)))]
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return leaves
    return [] if is_plain(x) else [x]


def _facts(x: Any) -> Any:
    """Return the facts that are equal for objects that differ only in tensors."""
    if isinstance(x, torch.Tensor):
        wrapper: Any = x
        return repr(wrapper.__tensor_flatten__()) if is_wrapper(x) else "tensor"
    if _is_open(x):
        return type(x).__qualname__, [(str(name), _facts(one)) for name, one in _held(x).items()]
    return x if isinstance(x, bool | int | float | complex | str | type(None)) else type(x)


def _with_leaves(x: Any, leaves: Mapping[int, Any]) -> Any:
    """Return ``x`` with other leaves; the same object if it holds none of them."""
    if id(x) in leaves:
        return leaves[id(x)]
    if isinstance(x, torch.Tensor):
        return rebuilt(x, lambda part: leaves.get(id(part), part))
    if not _is_open(x):
        return x
    new = {name: _with_leaves(one, leaves) for name, one in _held(x).items()}
    if all(new[name] is one for name, one in _held(x).items()):
        return x
    if isinstance(x, tuple):
        return type(x)._make(new.values()) if hasattr(x, "_make") else type(x)(new.values())
    copied, named = copy.copy(x), attributes(x)
    for name, one in new.items():
        if isinstance(x, list) or (isinstance(x, dict) and name in x):
            copied[name] = one
        if name in named:
            object.__setattr__(copied, name, one)
    return copied


def _children(unfolded: Unfolded) -> tuple[list[Any], _Shape]:
    return unfolded.leaves, _Shape(unfolded)


def _folded(leaves: Any, shape: _Shape) -> Any:
    pairs = zip(shape.leaves, leaves, strict=True)
    return _with_leaves(shape.whole, {id(old): new for old, new in pairs})


register_pytree_node(Unfolded, _children, _folded)
