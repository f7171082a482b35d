"""Objects in a result that pytree does not look into: their tensors are outputs as all others.

Each replay hands out objects of its own around its tensors, as the function does: what leads to
such a tensor is copied, and everything else is the same object as at the capture.
"""

import copy
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node

from commlib.core.tensors import is_pending, is_wrapper, parts, rebuilt
from commlib.errors import GraphError
from commlib.graph.reach import attributes, is_of_the_program

_MOST = 1000  # objects of one result that are looked through
_NESTS = (list, tuple, dict)
_CLOSED = (torch.nn.Module, torch.optim.Optimizer, Iterator, type)


class Unfolded:
    """An object of a result, with the tensors that it holds; a node of pytree."""

    def __init__(self, whole: Any, tensors: list[torch.Tensor]) -> None:
        self.whole, self.tensors = whole, tensors


class _Shape:
    """What an object is apart from its tensors: equal for objects that differ in these alone."""

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

    Raises ``GraphError`` for objects that hold themselves.
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
    """Return what a wrapper holds, else ``x``; so for what nobody has waited for."""
    if not is_wrapper(x) or is_pending(x):
        return [x]
    if x.requires_grad:
        raise GraphError(
            f"an output is a {type(x).__qualname__} that wants a gradient, and a graph knows those "
            f"of the tensors in it alone; return out.to_local()"
        )
    return parts(x) or [x]


def _is_open(x: Any) -> bool:
    """Return True for objects of the program that are what they hold."""
    if isinstance(x, (torch.Tensor, *_CLOSED)) or callable(x):
        return False
    if isinstance(x, (*_NESTS, SimpleNamespace)):
        return True
    return is_of_the_program(type(x)) and bool(attributes(x))


def _held(x: Any) -> Mapping[Any, Any]:
    """Return what an open object holds, by its names or places."""
    if isinstance(x, dict):
        return {**x, **attributes(x)}
    if isinstance(x, list | tuple):
        return dict(enumerate(x))
    return attributes(x)


def _tensors(x: Any, inside: tuple[int, ...]) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield from _parts(x)
    elif _is_open(x):
        if id(x) in inside or len(inside) > _MOST:
            raise GraphError(
                f"an output is a {type(x).__qualname__} that holds itself, in which no replay "
                f"could put new tensors; return the tensors themselves"
            )
        for one in _held(x).values():
            yield from _tensors(one, (*inside, id(x)))


def _facts(x: Any) -> Any:
    """Return what is to be equal of two objects that hold other tensors."""
    if isinstance(x, torch.Tensor):
        wrapper: Any = x
        return repr(wrapper.__tensor_flatten__()) if is_wrapper(x) else "tensor"
    if _is_open(x):
        return type(x).__qualname__, [(str(name), _facts(one)) for name, one in _held(x).items()]
    return x if isinstance(x, bool | int | float | complex | str | type(None)) else type(x)


def _with_tensors(x: Any, tensors: Mapping[int, Any]) -> Any:
    """Return ``x`` with other tensors; the same object where it holds none of these."""
    if isinstance(x, torch.Tensor):
        own = tensors.get(id(x))
        return rebuilt(x, lambda part: tensors.get(id(part), part)) if own is None else own
    if not _is_open(x):
        return x
    now = {name: _with_tensors(one, tensors) for name, one in _held(x).items()}
    if all(now[name] is one for name, one in _held(x).items()):
        return x
    now = {name: copy.copy(one) if isinstance(one, _NESTS) else one for name, one in now.items()}
    if isinstance(x, tuple):
        return type(x)._make(now.values()) if hasattr(x, "_make") else type(x)(now.values())
    made, named = copy.copy(x), attributes(x)
    for name, one in now.items():
        if isinstance(x, list) or (isinstance(x, dict) and name in x):
            made[name] = one
        if name in named:
            object.__setattr__(made, name, one)
    return made


def _children(unfolded: Unfolded) -> tuple[list[torch.Tensor], _Shape]:
    return unfolded.tensors, _Shape(unfolded)


def _folded(tensors: Any, shape: _Shape) -> Any:
    pairs = zip(shape.tensors, tensors, strict=True)
    return _with_tensors(shape.whole, {id(was): now for was, now in pairs})


register_pytree_node(Unfolded, _children, _folded)
