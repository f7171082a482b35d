"""Places of tensors, to find which hold another tensor now, and tensors with other memory now."""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch

from commlib.graph.calls.tensor_addresses import HeldTensors, has_address
from commlib.graph.operators.schema import memory
from commlib.graph.python.contents import Fact

Name: TypeAlias = tuple[int, str]  # whose a place is, and what it is called


class Around(NamedTuple):
    """The questions about the places around a function.

    Attributes:
        version: Returns numbers that are others where a place may hold something else.
        items: Yields the tensors in containers and in attributes of modules, with their names.
        own: Names of what the function itself replaces: their places tell nothing.
    """

    version: Callable[[], tuple[int, ...]]
    items: Callable[[], Iterable[tuple[Name, torch.Tensor]]]
    own: Collection[Any]


class TensorPlaces:
    """The tensors that places held at one moment, and the memory of tensors.

    One that is replaced by another may still be held elsewhere, so that its release does not tell.
    """

    def __init__(
        self,
        around: Around,
        optimizers: Iterable[torch.optim.Optimizer],
        tensors: Iterable[torch.Tensor],
        uses: Callable[[int], bool],
    ) -> None:
        """Look at all places.

        Args:
            around: Containers and modules.
            optimizers: Optimizers, whose states hold tensors.
            tensors: Tensors that the function can reach, whose memory the program may replace.
            uses: Returns True for the memory of a tensor that counts.
        """
        self._around, self._version = around, around.version()
        found = addresses(around.items())
        self._addresses = {name: at for name, at in found if name not in around.own and uses(at[0])}
        states = [_State(x, uses) for x in optimizers]
        self._states = [each for each in states if each.counts]
        self._held = HeldTensors(x for x in tensors if has_address(x) and uses(memory(x)))

    @property
    def changed(self) -> bool:
        """Return True if a place holds another tensor now, or a tensor has other memory."""
        if self._addresses and self._have_others:
            return True
        if self._states and any(each.changed for each in self._states):
            return True
        return bool(self._held) and self._held.moved

    @property
    def _have_others(self) -> bool:
        """Return True if a container or a module holds another tensor now."""
        version = self._around.version()
        if version == self._version:
            return False
        own, now = self._around.own, dict(addresses(self._around.items()))
        if any(name in own or now.get(name) != at for name, at in self._addresses.items()):
            return True
        self._version = version  # something else is new
        return False


class _State:
    """The tensors of an optimizer's state at one moment. It keeps none of them alive."""

    def __init__(self, optimizer: torch.optim.Optimizer, uses: Callable[[int], bool]) -> None:
        self._optimizer = optimizer
        self._tensors = {
            name: ref(x) for name, x in self._named() if has_address(x) and uses(memory(x))
        }
        self._known = self._ids()
        self.counts = bool(self._tensors)

    def _named(self) -> Iterator[tuple[Any, Any]]:
        """Yield what the state holds, with the place of each."""
        for key, held in self._optimizer.state.items():
            items = held.items() if isinstance(held, dict) else ((None, held),)
            yield from (((id(key), name), x) for name, x in items)

    def _ids(self) -> list[int]:
        """Return the numbers of all objects in the state; a released one is noticed elsewhere."""
        held = self._optimizer.state.values()
        inner = (x for x in held if isinstance(x, dict))
        return [*map(id, held), *map(id, chain.from_iterable(map(dict.values, inner)))]

    @property
    def changed(self) -> bool:
        """Return True if the state holds another tensor in place of one that counts."""
        ids = self._ids()
        if ids == self._known:
            return False
        now = dict(self._named())
        for name, known in self._tensors.items():
            tensor = known()
            if tensor is None or now.get(name) is not tensor:
                return True
        self._known = ids  # something else is new
        return False


def addresses(items: Iterable[tuple[Name, torch.Tensor]]) -> Iterator[Fact]:
    """Yield the address and layout of each tensor, under the name of its place."""
    for (where, name), x in items:
        if has_address(x):
            at = memory(x), x.storage_offset(), x.shape, x.stride(), x.dtype
            yield (where, f"the place of {name}"), at


NO_PLACES = TensorPlaces(Around(tuple, tuple, ()), (), (), bool)
