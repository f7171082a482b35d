"""The kinds of outputs of a captured function, with what a replay gives for each."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Argument(NamedTuple):
    """The caller's own tensor, handed back."""

    position: int


class View(NamedTuple):
    """A view of one of the caller's tensors."""

    position: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from that tensor's first element on
    detached: bool
    leaf: bool  # it requires grad itself

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it of the tensor that this call was given."""
        source = tensor.detach() if self.detached else tensor
        offset = tensor.storage_offset() + self.offset
        view = source.as_strided(self.size, self.stride, offset)
        return view.requires_grad_() if self.leaf else view


class Again(NamedTuple):
    """The very tensor of an earlier place."""

    place: int


@dataclass(frozen=True, eq=False)
class PartOf:
    """A view of the tensor of another place; a result holds this in place of the view."""

    place: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from that tensor's first element on
    detached: bool
    no_grad: bool  # it requires grad, but was made where autograd was off
    later: bool  # it is a view of such a view, made where autograd was on
    number: int  # of its node in the order of autograd, which adds up gradients in that order

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it of the tensor that this call has there."""
        tensor = tensor.detach() if self.detached else tensor
        offset = tensor.storage_offset() + self.offset
        with torch.no_grad() if self.no_grad else nullcontext():
            view = tensor.as_strided(self.size, self.stride, offset)
        return view.view_as(view) if self.later else view


def in_turn(parts: Mapping[int, PartOf]) -> list[tuple[int, PartOf]]:
    """Return views with their places, each after what it is of, and else in autograd's order.

    A write to a view of a tensor gives both a new node. So what it is of may have a later one.
    """

    def turn(i: int) -> tuple[int, int]:
        number, depth = parts[i].number, 0
        while parts[i].place in parts:
            i, depth = parts[i].place, depth + 1
            number = max(number, parts[i].number)
        return number, depth

    return [(i, parts[i]) for i in sorted(parts, key=turn)]


class Borrowed(NamedTuple):
    """Memory of the graph, to be overwritten by its next replay."""

    tensor: torch.Tensor
    packed: bool  # A clone has the same strides.
    leaf: bool  # It requires grad, and comes from no operator.
    copied: bool  # It has a class of the program, which no borrowed output can have.


class Alias(NamedTuple):
    """Memory that lives outside, in a tensor that each call makes."""

    tensor: torch.Tensor

    def again(self) -> torch.Tensor:
        """Return it for a replay."""
        if self.tensor.grad_fn is not None:
            return self.tensor.view_as(self.tensor)
        return self.tensor.detach().requires_grad_(self.tensor.requires_grad)


class Made(NamedTuple):
    """An object that each call makes."""

    value: Any


class Plain(NamedTuple):
    """Anything else: a plain value, an object or a tensor of the program."""

    value: Any


Output = Argument | View | Again | PartOf | Borrowed | Alias | Made | Plain
