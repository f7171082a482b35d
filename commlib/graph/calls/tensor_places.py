"""Places of tensors, to find which hold another tensor now, and tensors with other memory now."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import ref

import torch

from commlib.core.tensors import parts
from commlib.graph.calls.tensor_addresses import HeldTensors, at_addresses, has_address, layout_of
from commlib.graph.operators.schema import memory

Name: TypeAlias = tuple[Hashable, ...]  # of a place


class Around(NamedTuple):
    """The questions about the places around a function.

    Attributes:
        version: Returns numbers that are others where a place may hold something else.
        items: Yields the tensors in containers and in attributes of modules, with their places.
        optimizers: Optimizers, whose states hold tensors.
    """

    version: Callable[[], tuple[int, ...]]
    items: Callable[[], Iterable[tuple[Name, torch.Tensor]]]
    optimizers: Iterable[torch.optim.Optimizer]


class Places(Protocol):
    """Places of tensors that are asked at each call."""

    def have_changed(self) -> bool:
        """Return True if a place holds another tensor now, or a tensor has other memory."""


class TensorPlaces:
    """The tensors that places held at one moment, and the memory of tensors.

    One that is replaced by another may still be held elsewhere, so that its release does not tell.
    What each call binds itself does not count: its graph reads another tensor.
    """

    def __init__(
        self,
        around: Around,
        held: Iterable[Any],
        given: Iterable[torch.Tensor],
        uses: Callable[[int], bool],
    ) -> None:
        """Look at all places.

        Args:
            around: What is asked.
            held: Objects; the program may replace the memory of the tensors among them.
            given: The arguments of the call: a place may hold another one at each call.
            uses: Returns True for the memory of a tensor that counts.
        """
        self._around, self._version = around, around.version()
        passed = {memory(part) for x in given for part in parts(x)}
        self._places = {}
        for slot, x in around.items():
            if any(uses(key) and key not in passed for key in map(memory, _parts_of(x))):
                self._places[slot] = _address(x)
        states = [_State(x, uses) for x in around.optimizers]
        self._states = [each for each in states if each.counts]
        tensors = {id(x): x for one in held for x in _parts_of(one)}
        used = [x for x in tensors.values() if uses(memory(x))]
        self._held = HeldTensors(used) if used else None

    def have_changed(self) -> bool:
        """Return True if a place holds another tensor now, or a tensor has other memory."""
        if self._places and self._hold_others():
            return True
        if self._states and any(each.has_changed() for each in self._states):
            return True
        return self._held is not None and self._held.have_moved()

    def _hold_others(self) -> bool:
        """Return True if a container or a module holds another tensor now."""
        version = self._around.version()
        if version == self._version:
            return False
        count = 0
        for slot, x in self._around.items():
            address = self._places.get(slot)
            if address is not None:
                if _address(x) != address:
                    return True
                count += 1
        if count < len(self._places):
            return True
        self._version = version  # something else is new
        return False


class AllPlaces:
    """The places of several surroundings."""

    def __init__(self, places: Iterable[Places]) -> None:
        self._all = [*places]

    def have_changed(self) -> bool:
        """Return True if one of them has changed."""
        return any(each.have_changed() for each in self._all)


class _State:
    """The tensors of an optimizer's state at one moment. It keeps none of them alive."""

    def __init__(self, optimizer: torch.optim.Optimizer, uses: Callable[[int], bool]) -> None:
        self._optimizer = optimizer
        counting = ((name, x) for name, x in self._named() if has_address(x) and uses(memory(x)))
        self._tensors: dict[Any, tuple[ref[torch.Tensor], int]] = {
            name: (ref(x), x.data_ptr()) for name, x in counting
        }
        self._note(self._objects())
        self.counts = bool(self._tensors)

    def _named(self) -> Iterator[tuple[Any, Any]]:
        """Yield what the state holds, with the place of each."""
        for key, held in self._optimizer.state.items():
            items = held.items() if isinstance(held, dict) else ((None, held),)
            yield from (((id(key), name), x) for name, x in items)

    def _objects(self) -> list[Any]:
        """Return all objects in the state."""
        held = self._optimizer.state.values()
        inner = (x for x in held if isinstance(x, dict))
        return [*held, *chain.from_iterable(map(dict.values, inner))]

    def _note(self, objects: list[Any]) -> None:
        """Compare with these from now on; the release of one is noticed elsewhere."""
        pointers = {id(tensor_ref()): pointer for tensor_ref, pointer in self._tensors.values()}
        positions = [i for i, x in enumerate(objects) if id(x) in pointers]
        addresses = [pointers.get(id(x), 0) for x in objects]
        self._known = [*map(id, objects)], addresses, positions

    def has_changed(self) -> bool:
        """Return True if the state holds another tensor, or other memory, where one counts."""
        objects, (ids, pointers, positions) = self._objects(), self._known
        if [*map(id, objects)] == ids:
            return not at_addresses(objects, pointers, positions)
        now = dict(self._named())
        for name, (tensor_ref, pointer) in self._tensors.items():
            tensor = tensor_ref()
            if tensor is None or tensor.data_ptr() != pointer or now.get(name) is not tensor:
                return True
        self._note(objects)  # something else is new
        return False


def _parts_of(x: Any) -> list[torch.Tensor]:
    """Return the tensors with an address that a tensor is made of; none for another object."""
    return [*filter(has_address, parts(x))] if isinstance(x, torch.Tensor) else []


def _address(x: torch.Tensor) -> tuple[Any, ...]:
    """Return where the parts of a tensor are, and their layouts."""
    return tuple((memory(y), y.storage_offset(), layout_of(y)) for y in _parts_of(x))


class _NoPlaces:
    """No place."""

    def have_changed(self) -> bool:
        """Return False."""
        return False


NO_PLACES: Places = _NoPlaces()
