"""Addresses and layouts of tensors at one moment, to find those that have other memory now."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from commlib.core.tensors import is_wrapper

_FEW = 3  # tensors that are asked faster one by one than in one call
_MODES = 4  # of torch, between which calls may change without looking at every tensor


def _equal_one_by_one(
    tensors: list[torch.Tensor], pointers: list[int], positions: list[int]
) -> bool:
    return [tensors[i].data_ptr() for i in positions] == [pointers[i] for i in positions]


# Compares all addresses in one call, if torch has this function.
at_addresses: Callable[[list[torch.Tensor], list[int], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _equal_one_by_one
)


class TensorAddresses:
    """The addresses and layouts that different tensors had at one moment. It keeps none alive.

    Attributes:
        facts: The address and the layout of each.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._pointers = [x.data_ptr() for x in tensors]
        self._positions = list(range(len(tensors)))
        self.facts = tuple(zip(self._pointers, map(layout_of, tensors), strict=True))
        self._guards: list[Any] = []  # of the modes in which they were asked
        self._note_guards(tensors)

    def _note_guards(self, tensors: Sequence[torch.Tensor]) -> None:
        guards = layout_guards(tensors)
        if guards is not None:
            self._guards = [guards, *self._guards[: _MODES - 1]]

    def are_of(self, tensors: list[torch.Tensor]) -> bool:
        """Return True if the same tensors are where they were, with the layouts that they had."""
        if not tensors:
            return True
        if len(tensors) <= _FEW:
            if [x.data_ptr() for x in tensors] != self._pointers:
                return False
        elif not at_addresses(tensors, self._pointers, self._positions):
            return False
        for guards in self._guards:
            if guards.check(*tensors):
                return True
        if [*map(layout_of, tensors)] != [layout for _, layout in self.facts]:
            return False
        self._note_guards(tensors)
        return True


class HeldTensors:
    """Tensors that the program holds, by weak references, and where they were at one moment."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        held = [*tensors]
        self._known = [*map(weakref.ref, held)], TensorAddresses(held)

    def have_moved(self) -> bool:
        """Return True if one has other memory or another layout now; released ones do not count."""
        references, addresses = self._known
        tensors = [x for each in references if (x := each()) is not None]
        if len(tensors) == len(references):
            return not addresses.are_of(tensors)
        pairs = zip(references, addresses.facts, strict=True)
        alive = [(each, x, fact) for each, fact in pairs if (x := each()) is not None]
        now = TensorAddresses([x for _, x, _ in alive])
        if now.facts != tuple(fact for *_, fact in alive):
            return True
        self._known = [each for each, *_ in alive], now
        return False


def layout_guards(tensors: Sequence[torch.Tensor]) -> Any:
    """Return what compares dtypes, sizes and strides with these in one call, as Dynamo does.

    None where there are other than ordinary tensors, or torch does not have it. It compares more:
    in inference mode or under autocast the same tensors differ from themselves.
    """
    kind: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    plain = all(has_address(x) and not is_wrapper(x) for x in tensors)
    if kind is None or not tensors or not plain:
        return None
    sizes, strides = [[*x.shape] for x in tensors], [[*x.stride()] for x in tensors]
    return kind(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def has_address(x: Any) -> bool:
    """Return True for tensors with memory of one address."""
    strided = isinstance(x, torch.Tensor) and not is_lazy(x) and x.layout is torch.strided
    return strided and not x.is_nested


def layout_of(x: torch.Tensor) -> tuple[Any, ...]:
    """Return how a tensor's values are in its memory."""
    return x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg()
