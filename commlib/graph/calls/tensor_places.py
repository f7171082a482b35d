"""Places of tensors, to find which hold another tensor now, and tensors with other memory now."""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias
from weakref import ref

import torch

from commlib.graph.calls.tensor_addresses import HeldTensors, has_address
from commlib.graph.operators.schema import memory
from commlib.graph.python.contents import Fact
from commlib.graph.python.setting import label

_FEW = 32  # items of a list or dict whose tensors' addresses are asked at every call

Variable: TypeAlias = tuple[int, str, Callable[[], Any]]  # whose it is, its name, how to read it


class TensorPlaces:
    """The tensors that places held at one moment, and the memory of tensors.

    One that is replaced by another may still be held elsewhere, so that its release does not tell.
    """

    def __init__(
        self,
        variables: Iterable[Variable],
        optimizers: Iterable[torch.optim.Optimizer],
        tensors: Iterable[torch.Tensor],
        own: Collection[Any],
        uses: Callable[[int], bool],
    ) -> None:
        """Look at small lists and dicts in ``variables``, and at the states of ``optimizers``.

        Args:
            variables: Variables of the function.
            optimizers: Its optimizers.
            tensors: Tensors that it can reach, whose memory the program may replace.
            own: Names of what the function itself replaces: their places tell nothing.
            uses: Returns True for the memory of a tensor that counts.
        """
        self._own = own
        self._variables = [each for each in variables if _is_small(each[2]())]
        found = addresses(self._variables)
        self._addresses = {name: at for name, at in found if name not in own and uses(at[0])}
        states = [_State(x, uses) for x in optimizers]
        self._states = [each for each in states if each.counts]
        self._held = HeldTensors(x for x in tensors if has_address(x) and uses(memory(x)))

    @property
    def changed(self) -> bool:
        """Return True if a place holds another tensor now, or a tensor has other memory."""
        if self._addresses:
            now = dict(addresses(self._variables))
            for name, at in self._addresses.items():
                if name in self._own or now.get(name) != at:
                    return True
        if self._states and any(each.changed for each in self._states):
            return True
        return bool(self._held) and self._held.moved


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


def addresses(variables: Iterable[Variable]) -> Iterator[Fact]:
    """Yield the addresses of the tensors among the items of small lists and dicts."""
    for where, name, read in variables:
        x = read()
        if not _is_small(x):
            continue
        for key, held in list(x.items() if isinstance(x, dict) else enumerate(x)):
            if has_address(held):
                at = memory(held), held.storage_offset(), held.shape, held.stride(), held.dtype
                yield (where, f"the place of {name}[{label(key)}]"), at


def _is_small(x: Any) -> bool:
    """Return True for a list or dict that is asked at every call."""
    return type(x) in (list, dict) and len(x) <= _FEW


NO_PLACES = TensorPlaces((), (), (), (), bool)
