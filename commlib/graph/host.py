"""What the host does in a captured call: operators on CPU tensors, before each launch.

A GPU's graph holds none of it. Steps whose outcome may be another at each call, because they read
or write tensors of the program or draw random numbers, are run again before each launch. What
they give to the GPU is copied to memory that the graph reads. Where the function reads a value on
the host, to branch on it, the graph fits that value alone: a call with another one runs eagerly.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from commlib.graph.effects import Effects
from commlib.graph.refuse import refuse_changing, remedy_here, user_line
from commlib.graph.schema import OpCall
from commlib.graph.step import Step, as_recorded, map_tensors, tensors_in


class OtherValue(Exception):  # no failure: the call is made eagerly
    """A value that the host reads is another than at the capture; nothing has been launched."""


class Item(Protocol):
    """One thing that the host does."""

    def again(self) -> None:
        """Do it for the present call."""


class Upload(NamedTuple):
    """A copy from the host to where the graph reads it."""

    room: torch.Tensor
    source: torch.Tensor

    def again(self) -> None:
        """Copy what the source holds now, on the current stream."""
        self.room.copy_(self.source, non_blocking=True)


class Read(NamedTuple):
    """A value that the function has read at the capture."""

    tensor: torch.Tensor
    value: torch.Tensor
    where: str
    remedy: str | None

    def again(self) -> None:
        """Raise ``OtherValue`` where it is another one now."""
        if not _same_bits(self.tensor, self.value):
            raise OtherValue(
                f"a value that is read at {self.where} was {_text(self.value)} at the capture, and "
                f"is {_text(self.tensor)} now"
            )


class Seed:
    """Check that the generator was not set: cuDNN would restart its own random numbers."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._seed, self._offset = generator.initial_seed(), 0

    def again(self) -> None:
        """Raise ``OtherValue`` where its seed is another one, or where it has gone back."""
        seed, offset = self._generator.initial_seed(), self._generator.get_offset()
        if seed != self._seed or offset < self._offset:
            raise OtherValue("torch's generator was set, so that cuDNN restarts its dropout")
        self._offset = offset


class _Noted(NamedTuple):
    """An item with the memory that it touches."""

    item: Item
    uses: frozenset[int]
    changes: frozenset[int]
    draws: bool


class HostPart:
    """The host's part of one graph: noted in the capture, run before each launch.

    Attributes:
        reads: Where the function reads a value, so that the graph fits that one alone, if it does.
        constants: Memory of the function's own that holds the same at each call.
    """

    def __init__(self, room: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """``room``: returns memory for a tensor of the host, which no other graph writes."""
        self._room = room
        self._noted: list[_Noted] = []
        self._items: list[Item] = []  # before each launch
        self._once: list[Item] = []  # before the first
        self._seeds: dict[int, Seed] = {}  # by generator
        self._effects: Effects | None = None
        self.reads: str | None = None
        self.constants: set[int] = set()

    # -- in the capture ----------------------------------------------------------------------------

    def given(self, call: OpCall) -> tuple[Any, Any]:
        """Return an operator's arguments with what the host gives to the GPU already there.

        What the host reads for the operator is noted.
        """
        args, kwargs = call.args, call.kwargs
        own = [x for x in call.tensors if is_on_host(x)]
        if not own:
            return args, kwargs
        if _is_upload(call):
            return self._there(args), kwargs
        elsewhere = len(own) < len(call.tensors)
        if call.known.indexed and elsewhere:
            own = [x for x in tensors_in((args[0], args[2:])) if is_on_host(x)]
            args = (args[0], self._there(args[1]), *args[2:])
        if elsewhere or call.known.syncs:
            for tensor in own:
                self.note_read(tensor)
        return args, kwargs

    def _there(self, tree: Any) -> Any:
        return map_tensors(lambda x: self._upload(x) if is_on_host(x) else x, tree)

    def _upload(self, source: torch.Tensor) -> torch.Tensor:
        """Return memory of the GPU that the host fills with ``source`` before each launch."""
        source = source.detach()
        room = self._room(source)
        # What is the same at each call is copied as it is now: later steps may write to it.
        self._once.append(Upload(room, source.clone()))
        self._note(Upload(room, source), [source], ())
        return room

    def note_read(self, tensor: torch.Tensor) -> None:
        """Know a value that the function reads on the host."""
        tensor = tensor.detach()
        self._note(Read(tensor, tensor.clone(), user_line(), remedy_here()), [tensor], ())

    def note_seed(self, generator: torch.Generator) -> None:
        """Know an operator that draws from numbers which are made when a generator is set."""
        self._seeds.setdefault(id(generator), Seed(generator))

    def note_step(self, step: Step, written: Iterable[torch.Tensor], *, draws: bool) -> None:
        """Know an operator on tensors of the host. ``draws``: it draws random numbers."""
        changed = [*written, *(tensor for _, tensor in step.made)]
        self._note(step, tensors_in((step.args, step.kwargs)), changed, draws=draws)

    def _note(
        self,
        item: Item,
        used: Iterable[torch.Tensor],
        changed: Iterable[torch.Tensor],
        *,
        draws: bool = False,
    ) -> None:
        self._noted.append(_Noted(item, _memory(used), _memory(changed), draws))

    def end(
        self, is_outside: Callable[[int], bool], written: dict[int, torch.Tensor], drawn: Any
    ) -> None:
        """End the capture: keep what each call may do otherwise.

        Args:
            is_outside: Whether memory is the program's, by its key.
            written: Memory of the program's that the host writes.
            drawn: Generators that it draws from.

        Raises:
            GraphError: A value is read that the function itself changes at each call.
        """
        kept = self._varying(is_outside)
        self._refuse_own_values(kept, set(written))
        self._items = [each.item for each in kept]
        rooms = {id(item.room) for item in self._items if isinstance(item, Upload)}
        self._once = [x for x in self._once if id(x.room) not in rooms]  # type: ignore[attr-defined]
        reads = (item.where for item in self._items if isinstance(item, Read))
        self.reads = next(reads, None)
        if self.reads and (written or drawn):
            self._effects = Effects(written.values(), drawn, ())
        self._noted = []

    def _varying(self, is_outside: Callable[[int], bool]) -> list[_Noted]:
        """Return the items that depend on the program, or whose memory such an item writes."""
        touched = {key for each in self._noted for key in each.uses | each.changes}
        varying = set(filter(is_outside, touched))
        kept: set[int] = set()
        while True:
            more = [
                i
                for i, each in enumerate(self._noted)
                if i not in kept and (each.draws or (each.uses | each.changes) & varying)
            ]
            if not more:
                self.constants = touched - varying
                return [self._noted[i] for i in sorted(kept)]
            kept.update(more)
            varying.update(key for i in more for key in self._noted[i].changes)

    def _refuse_own_values(self, kept: Iterable[_Noted], written: set[int]) -> None:
        """Refuse reads of what the function itself changes: each call would have another value."""
        changing = set(written)
        for each in kept:
            if each.uses & changing:
                changing |= each.changes
        for each in kept:
            if isinstance(each.item, Read) and each.uses & changing:
                refuse_changing(each.item.where, each.item.remedy)

    @property
    def empty(self) -> bool:
        """Return True if there is nothing to do before a launch."""
        return not (self._items or self._once or self._seeds)

    # -- before each launch ------------------------------------------------------------------------

    def run(self) -> None:
        """Do it for the present call. Raises ``OtherValue``; then nothing has changed."""
        before = None if self._effects is None else self._effects.now()
        try:
            with as_recorded():
                for item in (*self._seeds.values(), *self._once, *self._items):
                    item.again()
        except OtherValue:
            if self._effects is not None and before is not None:
                self._effects.put(before)
            raise
        self._once = []


def is_on_host(x: torch.Tensor) -> bool:
    """Return True for a tensor in the memory of the host."""
    return x.is_cpu


def _is_upload(call: OpCall) -> bool:
    """Return True for a copy from the host to the GPU."""
    args = call.args
    if not call.known.copies:
        return False
    if call.func is torch.ops.aten.copy_.default:
        return is_on_host(args[1]) and not is_on_host(args[0])
    target = call.kwargs.get("device")
    return is_on_host(args[0]) and target is not None and torch.device(target).type != "cpu"


def _memory(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    return frozenset(x.untyped_storage()._cdata for x in tensors)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    pair = (x.resolve_conj().resolve_neg().contiguous().view(-1) for x in (one, other))
    a, b = (x.view(torch.uint8) for x in pair)
    return torch.equal(a, b)


def _text(x: torch.Tensor) -> str:
    return f"{x.tolist()!r:.60}"
