"""Objects in a result that pytree does not open: their tensors are outputs like all others.

Each replay returns new objects around its tensors, as the function does. Objects on the path to
such a tensor are copied. All others are the same objects as at the capture.
"""

import copy
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node

from commlib.core.tensors import is_pending, is_wrapper, parts, rebuilt
from commlib.errors import GraphError
from commlib.graph.python.reach import attributes, is_of_the_program

_MAX_DEPTH = 1000  # of objects in one result
_NESTS = (list, tuple, dict)
_CLOSED = (torch.nn.Module, torch.optim.Optimizer, Iterator, type)


class Unfolded:
    """An object of a result with the tensors that it holds; a node of pytree."""

    def __init__(self, whole: Any, tensors: list[torch.Tensor]) -> None:
        self.whole, self.tensors = whole, tensors


class _Shape:
    """An object without its tensors: equal for objects that differ only in tensors."""

    def __init__(self, unfolded: Unfolded) -> None:
        self.whole, self.tensors = unfolded.whole, unfolded.tensors
        self._facts = repr(_facts(unfolded.whole))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shape) and self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts)

    def __repr__(self) -> str:
        return f"{type(self.whole).__qualname__} with {len(self.tensors)} tensors"


def unfold(x: Any) -> Any:
    """Return an ``Unfolded`` for an object that holds tensors, else ``x`` itself.

    Raises ``GraphError`` for objects that contain themselves.
    """
    if isinstance(x, torch.Tensor):
        return _unwrapped(x)
    if not _is_open(x):
        return x
    tensors = list(_tensors(x, ()))
    return Unfolded(x, [*{id(one): one for one in tensors}.values()]) if tensors else x


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


def _tensors(x: Any, inside: tuple[int, ...]) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield from _parts(x)
    elif _is_open(x):
        if id(x) in inside or len(inside) > _MAX_DEPTH:
            raise GraphError(
                f"an output is a {type(x).__qualname__} that holds itself, so that a replay "
                f"can't put new tensors in it; return the tensors themselves"
            )
        for one in _held(x).values():
            yield from _tensors(one, (*inside, id(x)))


def _facts(x: Any) -> Any:
    """Return the facts that are equal for objects that differ only in tensors."""
    if isinstance(x, torch.Tensor):
        wrapper: Any = x
        return repr(wrapper.__tensor_flatten__()) if is_wrapper(x) else "tensor"
    if _is_open(x):
        return type(x).__qualname__, [(str(name), _facts(one)) for name, one in _held(x).items()]
    return x if isinstance(x, bool | int | float | complex | str | type(None)) else type(x)


def _with_tensors(x: Any, tensors: Mapping[int, Any]) -> Any:
    """Return ``x`` with other tensors; the same object if it holds none of them."""
    if isinstance(x, torch.Tensor):
        new = tensors.get(id(x))
        return rebuilt(x, lambda part: tensors.get(id(part), part)) if new is None else new
    if not _is_open(x):
        return x
    new = {name: _with_tensors(one, tensors) for name, one in _held(x).items()}
    if all(new[name] is one for name, one in _held(x).items()):
        return x
    new = {name: copy.copy(one) if isinstance(one, _NESTS) else one for name, one in new.items()}
    if isinstance(x, tuple):
        return type(x)._make(new.values()) if hasattr(x, "_make") else type(x)(new.values())
    copied, named = copy.copy(x), attributes(x)
    for name, one in new.items():
        if isinstance(x, list) or (isinstance(x, dict) and name in x):
            copied[name] = one
        if name in named:
            object.__setattr__(copied, name, one)
    return copied


def _children(unfolded: Unfolded) -> tuple[list[torch.Tensor], _Shape]:
    return unfolded.tensors, _Shape(unfolded)


def _folded(tensors: Any, shape: _Shape) -> Any:
    pairs = zip(shape.tensors, tensors, strict=True)
    return _with_tensors(shape.whole, {id(old): new for old, new in pairs})


register_pytree_node(Unfolded, _children, _folded)
