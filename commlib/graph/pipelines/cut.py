"""Cut a list of layers into the longest stretches that can be captured."""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from commlib.errors import GraphError
from commlib.graph.pipelines.layers import EagerLayer, Layer
from commlib.graph.python.reach import reached
from commlib.graph.recording.eager_parts import is_eager

_MODULE = (torch.nn.Module,)


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
    """Cuts of a list of layers, and the layers that stay outside any graph.

    Attributes:
        eager: Positions of layers that stay eager.
        apart: Positions of layers that are captured one by one.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        breaks: Sequence[int | type],
        shared: Sequence[torch.nn.Module],
    ) -> None:
        """See ``pipeline``. Raises ``GraphError`` for arguments that fit no layer."""
        for name, values in (("breaks", breaks), ("shared", shared)):
            if not isinstance(values, Iterable):
                raise GraphError(f"pipeline: {name} is {values!r:.60}; expected a list")
        breaks, shared = [*breaks], [*shared]
        self._count, self._borders = len(layers), _borders(layers, breaks)
        self.eager = {i for i, x in enumerate(layers) if is_eager(x) or isinstance(x, EagerLayer)}
        self.eager |= _users(layers, shared)
        self._given = frozenset(self.eager)
        self.apart: set[int] = set()
        self._users = _users_of_weights(layers)

    def forget(self) -> None:
        """Forget what failures have shown."""
        self.eager, self.apart = set(self._given), set()

    def stretches(self, probed: Collection[int] = ()) -> list[Stretch]:
        """Return the stretches in order; ``probed``: layers that are captured one by one now."""
        while tied := self._tied(stretches := self._stretches(probed)):
            self.eager |= tied
        return stretches

    def _stretches(self, probed: Collection[int]) -> list[Stretch]:
        alone = {*probed, *self.apart, *self.eager}
        ends = {0, self._count, *self._borders, *alone, *(i + 1 for i in alone)}
        return [Stretch(start, stop, start in self.eager) for start, stop in pairwise(sorted(ends))]

    def _tied(self, stretches: Sequence[Stretch]) -> set[int]:
        """Return layers whose weights several stretches use, and that have to be eager for that.

        A graph adds the gradients of its uses first. Eager code adds all uses one after the
        other, and the last bits of a sum depend on its order.
        """
        stretch_of = {i: number for number, each in enumerate(stretches) for i in each.layers}
        tied = [users for users in self._users if len({stretch_of[i] for i in users}) > 1]
        return set[int]().union(*tied) - self.eager


def _borders(layers: Sequence[Layer], breaks: Sequence[int | type]) -> set[int]:
    borders: set[int] = set()
    for each in breaks:
        if isinstance(each, type):
            borders |= {i for i, layer in enumerate(layers) if isinstance(layer, each)}
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
            borders.add(each)
    return borders


def _users(layers: Sequence[Layer], shared: Sequence[torch.nn.Module]) -> set[int]:
    """Return the positions of the layers that are, or have, one of ``shared``."""
    positions: set[int] = set()
    for each in shared:
        if not isinstance(each, torch.nn.Module):
            raise GraphError(f"pipeline: shared has {each!r}; expected modules that are layers")
        users = {i for i, layer in enumerate(layers) if any(x is each for x in _modules(layer))}
        if not users:
            raise GraphError(
                f"pipeline: shared has {type(each).__name__}, which no layer is or uses; pass the "
                f"module itself, or leave it out on ranks that don't have it"
            )
        positions |= users
    return positions


def _users_of_weights(layers: Sequence[Layer]) -> list[set[int]]:
    """Return for each weight that several layers use the positions of these layers."""
    users: dict[int, set[int]] = {}
    for i, layer in enumerate(layers):
        weights: list[torch.Tensor] = []
        for module in _modules(layer):
            weights += module.parameters()
        if not isinstance(layer, torch.nn.Module):
            weights += [x for x in reached([layer], ends=_MODULE).tensors if x.requires_grad]
        for weight in weights:
            users.setdefault(id(weight), set()).add(i)
    return [each for each in users.values() if len(each) > 1]


def _modules(layer: Layer) -> list[torch.nn.Module]:
    """Return the modules of a layer; of a function those that it names, without their parts."""
    layer = layer.__wrapped__ if isinstance(layer, EagerLayer) else layer
    if isinstance(layer, torch.nn.Module):
        return [*layer.modules()]
    return [x for x in reached([layer], ends=_MODULE).objects if isinstance(x, torch.nn.Module)]
