"""What tells one call of a captured function from another: a hashable key."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from commlib.errors import GraphError
from commlib.graph.calls.output_guard import GuardedTensor

_DEVICES = ("cuda", "cpu")
_NOTHING = tree_flatten(((), {}))[1]
# What is never unfolded.
_PLAIN = {torch.Tensor, torch.nn.Parameter, GuardedTensor, bool, int, float, str, type(None)}


@dataclass(slots=True)
class Arguments:
    """The arguments of one call: tensors, and the key of everything but the tensors' contents."""

    tensors: list[torch.Tensor]
    key: tuple[Any, ...]
    leaves: list[Any]
    spec: TreeSpec
    given: tuple[tuple[Any, ...], dict[str, Any]]  # what the caller has passed
    owners: list[torch.Tensor] = field(default_factory=list)  # leaves; their grads end the tensors
    grads: int = 0  # how many tensors these are

    def described(self) -> list[str]:
        """Return each argument in words: its shape and dtype, or its value."""
        return [
            f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else repr(x)[:80]
            for x in self.leaves
        ]

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs with other tensors in the places of these."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def still(
        self, tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether args and kwargs that were ``rebuilt`` with ``tensors`` hold what they held."""
        leaves, spec = tree_flatten((args, kwargs))
        others = iter(tensors)
        held = [next(others) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        return spec == self.spec and all(x is y for x, y in zip(leaves, held, strict=True))


def _ask_each() -> bool:
    return any(map(torch.is_autocast_enabled, _DEVICES))


# One question in place of one a device, where torch has it: it is asked at every call.
any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _ask_each)


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any], own: tuple[Any, ...]) -> Arguments:
    """Flatten a call and build its key; ``own`` is what the function adds to it.

    Raises ``GraphError`` for an argument that is neither a tensor nor hashable.
    """
    leaves, spec, shape = _flat(args, kwargs)
    tensors: list[torch.Tensor] = []
    parts: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            parts.append(of_tensor(leaf))
        else:
            parts.append(value(leaf))
    key = (shape, *parts, _shared(tensors), *modes(), *own)
    try:
        hash(key)
    except TypeError as error:
        raise GraphError(
            f"an argument can't be part of a graph's key ({error}); pass tensors and hashable "
            f"values, or pass key= a function that represents it"
        ) from error
    return Arguments(tensors, key, leaves, spec, (args, kwargs))


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec, Any]:
    """Return the leaves of a call, its structure, and their representation in a key."""
    if not kwargs and _PLAIN.issuperset(map(type, args)):  # 10 µs less than in general
        return list(args), _of_leaves(len(args)), len(args)
    leaves, spec = tree_flatten((args, kwargs))
    return leaves, spec, spec


@cache
def _of_leaves(count: int) -> TreeSpec:
    return tree_flatten(((None,) * count, {}))[1]


def bare(key: tuple[Any, ...]) -> Arguments:
    """Return the call without any argument."""
    return Arguments([], key, [], _NOTHING, ((), {}))


def modes() -> tuple[Any, ...]:
    """What of torch's modes changes what a function does."""
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    if not any_autocast():
        return grad
    on = (device for device in _DEVICES if torch.is_autocast_enabled(device))
    return (*grad, *((device, torch.get_autocast_dtype(device)) for device in on))


def value(x: Any) -> tuple[Any, ...]:
    """Return what tells a plain value from another: numbers by type and bits, modules by modes."""
    if isinstance(x, float):
        return type(x), x.hex()
    if isinstance(x, complex):
        return type(x), x.real.hex(), x.imag.hex()
    if isinstance(x, np.generic):
        return type(x), x.tobytes()
    if isinstance(x, tuple):
        return type(x), *map(value, x)
    if isinstance(x, torch.nn.Module):
        return type(x), x, *(part.training for part in x.modules())
    return type(x), x


def of_tensor(x: torch.Tensor) -> tuple[Any, ...]:
    """Return what tells a tensor from another, but for its content and place."""
    wants = x.requires_grad and (2 if x.is_leaf and x.grad is None else 1)
    return (x.shape, x.dtype, x.device, x.stride() if x.layout is torch.strided else x.layout,
            wants, x.is_conj(), x.is_neg())  # fmt: skip


def _shared(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Which of the tensors begin where an earlier one does: the graph has them as one."""
    if len(tensors) < 2:
        return ()
    first: dict[int, int] = {}
    places = [first.setdefault(x.data_ptr(), i) for i, x in enumerate(tensors)]
    return () if len(first) == len(tensors) else tuple(places)
