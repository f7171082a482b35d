"""Cut a list of layers into the longest stretches that can be captured."""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from commlib.errors import GraphError
from commlib.graph.pipelines.layers import Layer
from commlib.graph.python.reach import reached
from commlib.graph.recording.eager_parts import is_eager


class Stretch(NamedTuple):
    """Neighbouring layers, from ``start`` up to ``stop``, that run together."""

    start: int
    stop: int
    eager: bool

    @property
    def layers(self) -> range:
        """Return the positions of the layers."""
        return range(self.start, self.stop)

    def __str__(self) -> str:
        last = f"-{self.stop - 1}" if len(self.layers) > 1 else ""
        return f"layers {self.start}{last}{' (eager)' if self.eager else ''}"


class Cuts:
    """Where a list of layers is cut, and which layers stay outside any graph.

    Attributes:
        count: How many layers there are.
        borders: Positions of layers that a stretch begins with.
        eager: Positions of layers that stay eager.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        breaks: Sequence[int | type],
        shared: Sequence[torch.nn.Module],
    ) -> None:
        """See ``pipeline``. Raises ``GraphError`` for arguments that fit no layer."""
        self.count = len(layers)
        self.borders = _borders(layers, breaks)
        self.eager = {i for i, layer in enumerate(layers) if is_eager(layer)} | _users(
            layers, shared
        )
        self._users = _users_of_weights(layers)
        self._leave_out_ties()

    def stretches(self, further: Collection[int] = ()) -> list[Stretch]:
        """Return the stretches in order; ``further``: layers that are cut off on both sides."""
        ends = {*further, *(i + 1 for i in further)} | self.borders
        ends |= self.eager | {i + 1 for i in self.eager}
        places = sorted({0, self.count} | {end for end in ends if end < self.count})
        return [Stretch(start, stop, start in self.eager) for start, stop in pairwise(places)]

    def leave_out(self, layers: Collection[int]) -> None:
        """Keep some layers outside any graph from now on."""
        self.eager.update(layers)
        self._leave_out_ties()

    def _leave_out_ties(self) -> None:
        """Keep layers eager whose weights are used in several stretches.

        A graph adds the gradients of its own uses first. Eager code adds all uses one after the
        other, and the last bits of a sum depend on its order.
        """
        tied: set[int] | None = None
        while tied is None or tied:
            place = {i: n for n, part in enumerate(self.stretches()) for i in part.layers}
            tied = set()
            for users in self._users:
                if len({place[i] for i in users}) > 1:
                    tied |= users - self.eager
            self.eager |= tied


def _borders(layers: Sequence[Layer], breaks: Sequence[int | type]) -> set[int]:
    found: set[int] = set()
    for each in breaks:
        if isinstance(each, type):
            found |= {i for i, layer in enumerate(layers) if isinstance(layer, each)}
        elif isinstance(each, bool) or not isinstance(each, int):
            raise GraphError(
                f"pipeline: breaks has {each!r}; expected positions of layers, or types of layers"
            )
        elif not 0 < each < len(layers):
            raise GraphError(
                f"pipeline: breaks has {each}; expected the position of a layer that a new graph "
                f"begins with, 1 to {len(layers) - 1}"
            )
        else:
            found.add(each)
    return found


def _users(layers: Sequence[Layer], shared: Sequence[torch.nn.Module]) -> set[int]:
    """Return the positions of the layers that are, or lead to, one of ``shared``."""
    found: set[int] = set()
    for each in shared:
        if not isinstance(each, torch.nn.Module):
            raise GraphError(f"pipeline: shared has {each!r}; expected modules that are layers")
        users = {i for i, layer in enumerate(layers) if any(x is each for x in _objects(layer))}
        if not users:
            raise GraphError(
                f"pipeline: shared has {type(each).__name__}, which no layer is or uses; pass the "
                f"module itself, or leave it out on ranks that don't have it"
            )
        found |= users
    return found


def _users_of_weights(layers: Sequence[Layer]) -> list[set[int]]:
    """Return for each weight that several layers use the positions of these layers."""
    users: dict[int, set[int]] = {}
    for i, layer in enumerate(layers):
        for weight in _weights(layer):
            users.setdefault(id(weight), set()).add(i)
    return [each for each in users.values() if len(each) > 1]


def _objects(layer: Layer) -> list[Any]:
    parts = [*layer.modules()] if isinstance(layer, torch.nn.Module) else [layer]
    return [*parts, *reached([layer]).objects]


def _weights(layer: Layer) -> Iterator[torch.Tensor]:
    """Yield the leaves with gradients that a layer uses, also through a closure."""
    modules = [x for x in _objects(layer) if isinstance(x, torch.nn.Module)]
    found = [x for module in modules for x in module.parameters()]
    for weight in (*found, *reached([layer]).tensors):
        if weight.is_leaf and weight.requires_grad:
            yield weight
