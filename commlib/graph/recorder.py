"""What one run of a function touches: tensors from outside, writes, random numbers, collectives."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from commlib.core import observers
from commlib.core.ring import Ring
from commlib.core.tensors import fault, is_wrapper, parts
from commlib.graph.generators import RngTracker, default_generator, generator_of
from commlib.graph.host import HostPart, is_on_host
from commlib.graph.literals import made_on_host
from commlib.graph.nested import watching_replays
from commlib.graph.one_hot import checking_each
from commlib.graph.overlap import Span, span
from commlib.graph.schema import OpCall
from commlib.graph.step import Step, computes_nothing, map_tensors, tensors_in
from commlib.graph.undo import UndoLog
from commlib.graph.unsupported import (
    check_borrowed,
    check_layouts,
    check_reshaping,
    check_resized,
    check_seeding,
    check_stray,
    check_sync,
    check_value,
    check_wrappers,
    user_line,
    watching_reads,
)

_aten = torch.ops.aten
_BY_OUTPUT = ("scatter", "broadcast")  # the input is the root's alone
_OWN_ITEMS = ("all_to_all", "exchange_rows", "send", "recv")  # differ between ranks
PEER_TO_PEER = ("send", "recv")  # the other ranks do not make them


class Collective(NamedTuple):
    """One call of a ring's verb, in the terms that all ranks must share."""

    ring: Ring
    verb: str
    dtype: str
    items: int
    rest: str  # reduction, root or peer
    where: str

    def __str__(self) -> str:
        return f"{self.verb} of {self.items} x {self.dtype}{self.rest} on ring {self.ring.ring_id}"


class Recorder(TorchDispatchMode):
    """Records a run; ``with Recorder(device) as seen: fn()``.

    Refuses what can't stand in a graph before it runs: ``GraphError`` with operator and line. With
    ``keep=True`` every step stays, with its tensors, to be run again. Before the first write to a
    tensor from outside its memory is copied: ``restore()`` puts it back.
    """

    refuses = True

    def __init__(
        self,
        device: torch.device,
        *,
        keep: bool = False,
        drawn: Sequence[torch.Generator] | None = None,
    ) -> None:
        """Know what is watched.

        Args:
            device: Where the function runs.
            keep: Whether every step stays.
            drawn: The generators that the run before has drawn from, where there was one.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn = drawn
        self.device, self.keep = device, keep
        self.names: list[str] = []  # operators with their plain arguments, in order
        self.launches = 0  # those that compute something, as views and new memory don't
        self.steps: list[Step] = []
        self.collectives: list[Collective] = []
        self.externals: dict[int, torch.Tensor] = {}  # by memory
        self.written: dict[int, torch.UntypedStorage] = {}  # memory from outside
        self.generators: dict[int, torch.Generator] = {}  # that it draws from, by id
        self.undo = UndoLog()
        self.made: dict[int, StorageWeakRef] = {}
        self.leaves: dict[int, weakref.ref[torch.Tensor]] = {}  # that want a gradient, by id
        self.computed: list[torch.Tensor] = []  # those from outside that autograd has made
        self._nested = self._capturing = False
        self._save = True
        self.host: HostPart | None = None  # in a capture on a GPU
        self.constants: dict[int, StorageWeakRef] = {}  # of another graph, on the host
        self._literals: set[int] = set()  # memory that what the function has typed is in
        self._borrowed: set[int] = set()  # memory of arrays that the function has made tensors of
        self._given: dict[int, weakref.ref[torch.Tensor]] = {}  # by an operator of this run, by id
        self._left: dict[int, RngTracker] = {}  # by generator
        self.read: dict[int, Span] = {}  # addresses, by memory that is touched and not just viewed
        self.wrote: dict[int, Span] = {}
        self.empty: set[int] = set()  # memory that the run before has left without a byte
        self.emptied: set[int] = set()  # memory from outside that this run leaves so
        self._sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}  # of memory from outside
        self._reading = ExitStack()

    # -- watching ----------------------------------------------------------------------------------

    def __enter__(self) -> "Recorder":
        if not self._capturing:
            for generator in (default_generator(self.device), *(self._drawn or ())):
                self._leave(generator)
        observers.observers.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        self._reading.enter_context(watching_reads())
        if self.device.type != "cpu":
            self._reading.enter_context(made_on_host())
            self._reading.enter_context(watching_replays())
        else:
            self._reading.enter_context(checking_each())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reading.close()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        observers.observers.remove(self)
        if kind is None and not self._capturing:
            for generator in self.generators.values():
                self._check_generator(generator)
        if kind is None:
            for key, (storage, nbytes) in self._sizes.items():
                self._check_size(key, storage, nbytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if computes_nothing():
            return func(*args, **(kwargs or {}))
        call = OpCall(func, args, kwargs or {})
        if call.known.lifts:
            call = OpCall(self._literal(args[0]), args, kwargs or {})
        if types and self._are_wrapped(call):
            return NotImplemented  # the wrapper's own operators on what it holds follow
        check_layouts(call, call.tensors)
        check_sync(call, self.device)
        self._note_read(call)
        written = self._note_written(call)
        generator = self._note_random(call)
        on_host = self.host is not None and all(map(is_on_host, call.tensors))
        keep = (self.keep or on_host) and not call.known.reshapes
        # As they are now: they may get another shape later.
        args, kwargs = self._as_they_are((call.args, call.kwargs)) if keep else ((), {})
        name = str(call)
        result = self._called(call, written)
        made = self._note_made(call, result)
        if generator is not None and not self._capturing:
            self._leave(generator)
        changed = [tensor for _, tensor in made] + written
        if self._capturing:
            check_stray(call, changed)
        if not call.known.detaches:
            self.names.append(name)
        on_host = on_host and all(map(is_on_host, changed))
        if call.known.computes and not on_host and any(map(torch.Tensor.numel, changed)):
            self.launches += 1
        if keep and (self.keep or (on_host and changed)):
            kept = tuple((i, self._as_they_are(tensor)) for i, tensor in made)
            step = Step(call.func, args, kwargs, kept, torch.is_grad_enabled())
            if self.host is None:
                self.steps.append(step)
            else:
                self.host.note_step(step, written, draws=generator is not None)
        return result

    def _are_wrapped(self, call: OpCall) -> bool:
        """Return True if an operator is called on wrappers, whose leaves are known from here on."""
        wrapped = [x for x in call.tensors if is_wrapper(x) and fault(x, "it") is not None]
        check_wrappers(call, [x for x in wrapped if not parts(x)])
        for tensor in wrapped:
            if tensor.is_leaf and tensor.requires_grad:
                self._know_leaf(tensor)
        return bool(wrapped)

    def _note_read(self, call: OpCall) -> None:
        """Know what an operator reads from outside."""
        for tensor, key in zip(call.tensors, call.memory, strict=False):
            if key not in self.made:
                self._know(tensor)
                if not call.known.only_views:
                    self._touch(self.read, tensor)
        if call.known.reshapes and not self._own(call.args[0]):
            check_reshaping(call)

    def _note_written(self, call: OpCall) -> list[torch.Tensor]:
        """Know what an operator writes to, before it does; returns that."""
        written = call.written
        for tensor in written:
            self._touch(self.wrote, tensor)
            if tensor.untyped_storage()._cdata in self._borrowed:
                check_borrowed(call)
            self._before_write(tensor)
        return written

    def _called(self, call: OpCall, written: Sequence[torch.Tensor]) -> Any:
        """Run an operator; a collective inside it is not a separate step."""
        args, kwargs = call.args, call.kwargs
        if self.host is not None:
            if call.known.own_random and written:
                self.host.note_seed(default_generator(self.device))
            args, kwargs = self.host.given(call)
        if call.known.own:
            return call.func(*args, **kwargs)
        before, self._nested = self._nested, True
        try:
            with observers.still_watched(self):
                return call.func(*args, **kwargs)
        finally:
            self._nested = before

    def _note_made(self, call: OpCall, result: Any) -> list[tuple[int, torch.Tensor]]:
        """Know what an operator has returned; returns what has new memory, by its place."""
        results, made = tensors_in(result), []
        check_layouts(call, results)
        for i, tensor in enumerate(results):
            storage = tensor.untyped_storage()
            if storage._cdata not in call.memory:
                made.append((i, tensor))
                self.made[storage._cdata] = StorageWeakRef(storage)
            self._given[id(tensor)] = weakref.ref(tensor)
        return made

    def before_read(self, tensor: torch.Tensor, name: str) -> None:
        """Note or refuse a method that reads the values of a tensor."""
        if self.device.type == "cpu":
            check_value(name)
        elif self.host is not None and is_on_host(tensor):
            with observers.unwatched():
                self.host.note_read(tensor)

    def before(self, call: observers.Seen) -> None:
        """Note a collective; the gate says so before it launches."""
        if not self._nested:  # an operator has said what it reads and writes
            self._note_memory(call)
        tensor = call.out if call.x is None or call.collective in _BY_OUTPUT else call.x
        dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
        items = 0 if tensor is None or call.collective in _OWN_ITEMS else tensor.numel()
        rest = "".join(f", {part}" for part in _shared(call.args))
        found = Collective(call.ring, call.collective, dtype, items, rest, user_line())
        self.collectives.append(found)
        if self.keep and not self._nested:
            self.steps.append(Step(call.again, (), {}, ()))

    def _note_memory(self, call: observers.Seen) -> None:
        for known in tensors_in((call.x, call.out, call.args)):
            self._know(known)
            self._touch(self.read, known)
        if call.out is not None:
            self._touch(self.wrote, call.out)
            self._before_write(call.out)

    def _literal(self, x: torch.Tensor) -> Any:
        """Return the operator that makes the tensor of ``torch.tensor([...])`` at each call.

        It copies from what nobody can write to. Memory that is shared (``torch.as_tensor`` of an
        array) may be new or not: it is read where it is.
        """
        if x.untyped_storage().resizable():
            self._literals.add(x.untyped_storage()._cdata)
            return _aten.clone.default
        self._borrowed.add(x.untyped_storage()._cdata)
        return _aten.lift_fresh.default

    # -- memory ------------------------------------------------------------------------------------

    def _know(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.made:
            return
        _, nbytes = self._sizes.setdefault(key, (storage, storage.nbytes()))
        if key in self.empty:  # the function has filled it, and will empty it again
            self.made[key] = StorageWeakRef(storage)
            return
        if nbytes != storage.nbytes():
            check_resized(nbytes, storage.nbytes())
        if tensor.is_leaf and tensor.requires_grad:
            self._know_leaf(tensor)
        computed = tensor.grad_fn is not None and self._save and not self._own(tensor)
        if computed and all(tensor is not other for other in self.computed):
            self.computed.append(tensor)
        if key not in self.externals:  # its memory is what counts, not what it was computed from
            self.externals[key] = tensor if tensor.grad_fn is None else tensor.detach()

    def _check_size(self, key: int, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Refuse memory from outside that has another size now, but for what each run empties.

        What one run leaves empty the next one fills itself, as FSDP does with gathered parameters.
        """
        now = storage.nbytes()
        if key in self.empty:
            if now:
                check_resized(0, now)
        elif now != nbytes:
            if now or self._capturing or self.device.type == "cpu":
                check_resized(nbytes, now)
            self.emptied.add(key)

    def _touch(self, spans: dict[int, Span], tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self.made and tensor.numel():
            begin, end = span(tensor)
            low, high = spans.get(key, (begin, end))
            spans[key] = min(low, begin), max(high, end)

    def _own(self, tensor: torch.Tensor) -> bool:
        """Whether an operator of this run has given the tensor, if only a view."""
        known = self._given.get(id(tensor))
        return known is not None and known() is tensor

    def _as_they_are(self, tree: Any) -> Any:
        """Return other tensors over the same memory, for a replay.

        Autograd is to know of writes to what is outside, not of those to the graph's own memory:
        that is right again when a backward reads it.
        """

        def own(x: torch.Tensor) -> torch.Tensor:
            return x.data if x.untyped_storage()._cdata in self.made else x.detach()

        with torch._C.DisableTorchFunctionSubclass():
            return map_tensors(own, tree)

    def _know_leaf(self, tensor: torch.Tensor) -> None:
        """Several leaves may lie in one memory, as in flat buffers; the function's own go again."""
        known = self.leaves.get(id(tensor))
        if known is None or known() is None:
            self.leaves[id(tensor)] = weakref.ref(tensor)
            if self._save:
                self.undo.note_leaf(tensor)

    def note_unseen(self, tensors: Iterable[torch.Tensor]) -> None:
        """Know memory that the function writes, though no operator says so."""
        for tensor in tensors:
            self._know(tensor)
            self._touch(self.read, tensor)
            self._touch(self.wrote, tensor)
            self._before_write(tensor)

    def _before_write(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.made:
            return
        self.written[storage._cdata] = storage
        if self._save or (self.host is not None and is_on_host(tensor)):
            self.undo.note_write(tensor)

    def in_capture(self, host: HostPart) -> "Recorder":
        """Note what a capture on a GPU does; what ``host`` does is put back by ``restore()``.

        No memory of the GPU is copied, and what runs on a stream outside the capture is refused.
        """
        self._capturing, self._save, self.host = True, False, host
        return self

    def end_host(self) -> None:
        """End the host's part. Raises ``GraphError`` where no graph fits what it reads."""
        assert self.host is not None
        written = {
            key: self.externals[key] for key, x in self.written.items() if x.device.type == "cpu"
        }
        drawn = [x for x in self.generators.values() if x.device.type == "cpu"]
        self.host.end(self._is_outside, written, drawn)

    def _is_outside(self, key: int) -> bool:
        if key in self.made or key in self._literals:
            return False
        return key not in self.constants or self.constants[key].expired()

    def save_again(self) -> None:
        """Take once more what ``restore()`` puts back, for a run that is not watched."""
        for storage in self.written.values():
            self.undo.note_memory(storage)
        for generator in self.generators.values():
            self.undo.note_generator(generator)
        for leaf in self.known_leaves():
            self.undo.note_leaf(leaf)

    def known_leaves(self) -> list[torch.Tensor]:
        """Return the leaves from outside that the run has read and that are still there."""
        known = (reference() for reference in self.leaves.values())
        return [leaf for leaf in known if leaf is not None]

    def restore(self) -> None:
        """Put back what memory from outside, and generators, held before the run."""
        self.undo.restore()

    @property
    def rings(self) -> list[Ring]:
        """The rings of the collectives, by number."""
        found = {call.ring.ring_id: call.ring for call in self.collectives}
        return [found[number] for number in sorted(found)]

    def _note_random(self, call: OpCall) -> torch.Generator | None:
        """Return the generator of an operator that draws numbers, and know its state before."""
        generator = generator_of(call, self.device)
        if generator is None:
            return None
        if not self._capturing:  # in a capture it has no state that could be asked
            if self._drawn is not None and id(generator) not in self._left:
                check_seeding()  # the function makes one at each call
            self._check_generator(generator)
        if id(generator) not in self.generators:
            self.generators[id(generator)] = generator
            if self._save or (self.host is not None and generator.device.type == "cpu"):
                self.undo.note_generator(generator)
        return generator

    def _leave(self, generator: torch.Generator) -> None:
        self._left.setdefault(id(generator), RngTracker(generator)).leave()

    def _check_generator(self, generator: torch.Generator) -> None:
        """Refuse a run that sets a generator it draws from: a graph draws on from where it is."""
        drawn = self._left.get(id(generator))
        if drawn is not None and drawn.was_set():
            self.generators[id(generator)] = generator
            self.undo.note_generator(generator, drawn.begun)
            check_seeding()


def _shared(args: Sequence[Any]) -> Iterator[str]:
    """Yield what of a call's arguments all ranks have in common: root, reduction."""
    for arg in args:
        if isinstance(arg, int):
            yield str(arg)
        elif hasattr(arg, "op"):
            yield f"op {getattr(arg, 'name', None) or str(arg.op).rpartition('.')[2].lower()}"
