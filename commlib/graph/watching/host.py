"""Host work of a captured call: operators on CPU tensors, which run before each launch.

A GPU graph does not contain them. Steps whose result may change per call are run again before each
launch: they read or write tensors of the program, or draw random numbers. Their results are copied
to GPU memory that the graph reads. If the function reads a value on the host, to branch on it, the
graph is valid for that value only. A call with another value runs eagerly.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from commlib.engines.local import flat
from commlib.graph.operators.program_line import remedy_here, user_line
from commlib.graph.operators.schema import OpCall
from commlib.graph.operators.step import Step, as_recorded, map_tensors, tensors_in
from commlib.graph.operators.unsupported import check_changing
from commlib.graph.watching.effects import Effects
from commlib.graph.watching.touched_memory import TouchedMemory


class OtherValue(Exception):  # not a failure: the call runs eagerly
    """A value that the host reads differs from the capture; nothing has been launched."""


class Item(Protocol):
    """One step of the host."""

    def again(self) -> None:
        """Run the step for the current call."""


class Upload(NamedTuple):
    """A copy from the host to memory that the graph reads."""

    target: torch.Tensor
    source: torch.Tensor

    def again(self) -> None:
        """Copy the source's current values, on the current stream."""
        self.target.copy_(self.source, non_blocking=True)


class Read(NamedTuple):
    """A value that the function read during the capture."""

    tensor: torch.Tensor
    value: torch.Tensor
    where: str
    remedy: str | None

    def again(self) -> None:
        """Raise ``OtherValue`` if the value has changed."""
        if not _same_bits(self.tensor, self.value):
            raise OtherValue(
                f"a value that is read at {self.where} was {_text(self.value)} at the capture, and "
                f"is {_text(self.tensor)} now"
            )


class Seed:
    """A check that the generator was not set: cuDNN would then restart its random numbers."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._seed, self._offset = generator.initial_seed(), 0

    def again(self) -> None:
        """Raise ``OtherValue`` if its seed has changed or its offset has decreased."""
        seed, offset = self._generator.initial_seed(), self._generator.get_offset()
        if seed != self._seed or offset < self._offset:
            raise OtherValue("torch's generator was set, so that cuDNN restarts its dropout")
        self._offset = offset


class _Recorded(NamedTuple):
    """An item with the memory that it touches."""

    item: Item
    uses: frozenset[int]
    changes: frozenset[int]
    draws: bool


class HostPart:
    """The host steps of one graph: recorded in the capture, run before each launch.

    Attributes:
        reads: The line that reads a value, if the graph is valid for one value only.
        constants: Memory of the function that holds the same values at each call.
    """

    def __init__(self, allocate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """``allocate``: returns memory for a host tensor, which no other graph writes."""
        self._allocate = allocate
        self._recorded: list[_Recorded] = []
        self._items: list[Item] = []  # before each launch
        self._once: list[Item] = []  # before the first
        self._rooms: list[torch.Tensor] = []  # that the graph reads, as long as it is replayed
        self._seeds: dict[int, Seed] = {}  # by generator
        self._effects: Effects | None = None
        self.reads: str | None = None
        self.constants: set[int] = set()

    # -- in the capture ----------------------------------------------------------------------------

    def given(self, call: OpCall) -> tuple[Any, Any]:
        """Return an operator's arguments, with host tensors for the GPU replaced by GPU memory.

        Values that the host reads for the operator are recorded.
        """
        args, kwargs = call.args, call.kwargs
        on_host = [x for x in call.tensors if is_on_host(x)]
        if not on_host:
            return args, kwargs
        if _is_upload(call):
            return self._uploaded(args), kwargs
        on_gpu = len(on_host) < len(call.tensors)
        if call.known.indexed and on_gpu:
            on_host = [x for x in tensors_in((args[0], args[2:])) if is_on_host(x)]
            args = (args[0], self._uploaded(args[1]), *args[2:])
        if on_gpu or call.known.syncs:
            for tensor in on_host:
                self.note_read(tensor)
        return args, kwargs

    def _uploaded(self, tree: Any) -> Any:
        return map_tensors(lambda x: self._upload(x) if is_on_host(x) else x, tree)

    def _upload(self, source: torch.Tensor) -> torch.Tensor:
        """Return GPU memory that the host fills with ``source`` before each launch."""
        source = source.detach()
        target = self._allocate(source)
        self._rooms.append(target)
        # A constant is copied with its current values: later steps may write to it.
        self._once.append(Upload(target, source.clone()))
        self._note(Upload(target, source), [source], ())
        return target

    def note_read(self, tensor: torch.Tensor) -> None:
        """Record a value that the function reads on the host."""
        tensor = tensor.detach()
        self._note(Read(tensor, tensor.clone(), user_line(), remedy_here()), [tensor], ())

    def note_seed(self, generator: torch.Generator) -> None:
        """Record an operator whose random state is created when a generator is set."""
        self._seeds.setdefault(id(generator), Seed(generator))

    def note_step(self, step: Step, written: Iterable[torch.Tensor], *, draws: bool) -> None:
        """Record an operator on host tensors. ``draws``: it draws random numbers."""
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
        self._recorded.append(_Recorded(item, _memory(used), _memory(changed), draws))

    def end(self, memory: TouchedMemory, generators: Iterable[torch.Generator]) -> None:
        """End the capture: keep the steps whose result may differ per call.

        Args:
            memory: What the capture has touched.
            generators: Those that it draws from.

        Raises:
            GraphError: The host reads a value that the function itself changes at each call.
        """
        written = {
            key: memory.externals[key]
            for key, x in memory.written.items()
            if x.device.type == "cpu"
        }
        drawn = [x for x in generators if x.device.type == "cpu"]
        is_outside = memory.is_outside
        varying = self._varying(is_outside)
        self._check_reads(varying, set(written))
        self._items = [each.item for each in varying]
        targets = {id(item.target) for item in self._items if isinstance(item, Upload)}
        self._once = [x for x in self._once if id(x.target) not in targets]  # type: ignore[attr-defined]
        reads = (item.where for item in self._items if isinstance(item, Read))
        self.reads = next(reads, None)
        if self.reads and (written or drawn):
            self._effects = Effects(written.values(), drawn, ())
        self._recorded = []

    def _varying(self, is_outside: Callable[[int], bool]) -> list[_Recorded]:
        """Return the items that depend on the program, and items that share their memory."""
        touched = {key for each in self._recorded for key in each.uses | each.changes}
        varying = set(filter(is_outside, touched))
        selected: set[int] = set()
        while True:
            more = [
                i
                for i, each in enumerate(self._recorded)
                if i not in selected and (each.draws or (each.uses | each.changes) & varying)
            ]
            if not more:
                self.constants = touched - varying
                return [self._recorded[i] for i in sorted(selected)]
            selected.update(more)
            varying.update(key for i in more for key in self._recorded[i].changes)

    def _check_reads(self, varying: Iterable[_Recorded], written: set[int]) -> None:
        """Reject reads of values that the function changes: each call would read another value."""
        changing = set(written)
        for each in varying:
            if each.uses & changing:
                changing |= each.changes
        for each in varying:
            if isinstance(each.item, Read) and each.uses & changing:
                check_changing(each.item.where, each.item.remedy)

    @property
    def empty(self) -> bool:
        """Return True if there is nothing to do before a launch."""
        return not (self._items or self._once or self._seeds)

    # -- before each launch ------------------------------------------------------------------------

    def run(self) -> None:
        """Run all steps for the current call. Raises ``OtherValue``; then nothing has changed."""
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
    pair = (x.resolve_conj().resolve_neg().contiguous() for x in (one, other))
    a, b = (flat(x, torch.uint8) for x in pair)
    return torch.equal(a, b)


def _text(x: torch.Tensor) -> str:
    return f"{x.tolist()!r:.60}"
