"""The memory that a run of a function makes, reads and writes."""

import weakref
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from commlib.core.memory import Span, span
from commlib.graph.operators.history import node_of
from commlib.graph.operators.schema import OpCall
from commlib.graph.operators.unsupported import check_resized
from commlib.graph.watching.outside_reads import OutsideReads


@dataclass(eq=False)
class TouchedMemory:
    """Memory by its key, and whether it is the run's own or from outside.

    Attributes:
        made: The run's own.
        externals: A tensor of each piece from outside.
        written: Storages from outside that are written.
        read: Addresses from outside that are touched, and not just viewed.
        wrote: Addresses from outside that are written.
        empty: What the run before has left without a byte.
        emptied: What this run leaves so.
        constants: That of another graph on the host, which holds the same at each call.
        literals: What the function has typed (``torch.tensor([...])``).
        borrowed: Arrays that the function has made tensors of.
        reads: What each operator reads from outside.
    """

    made: dict[int, StorageWeakRef] = field(default_factory=dict)
    externals: dict[int, torch.Tensor] = field(default_factory=dict)
    written: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    read: dict[int, Span] = field(default_factory=dict)
    wrote: dict[int, Span] = field(default_factory=dict)
    empty: Set[int] = frozenset()
    emptied: set[int] = field(default_factory=set)
    constants: dict[int, StorageWeakRef] = field(default_factory=dict)
    literals: set[int] = field(default_factory=set)
    borrowed: set[int] = field(default_factory=set)
    reads: OutsideReads = field(default_factory=OutsideReads)
    # By an operator of this run, by id; the sizes are those of memory from outside.
    _given: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    _sizes: dict[int, tuple[torch.UntypedStorage, int]] = field(default_factory=dict)

    def note_made(
        self, results: Iterable[torch.Tensor], call: OpCall
    ) -> list[tuple[int, torch.Tensor]]:
        """Record what an operator has returned; returns what has new memory, by its place.

        ``call``: what the operator was given. It may return that very tensor.
        """
        made = []
        taken = set(map(id, call.tensors))
        for i, tensor in enumerate(results):
            storage = tensor.untyped_storage()
            if storage._cdata not in call.memory:
                if not tensor._is_zerotensor():  # zeros without memory, the same at each replay
                    made.append((i, tensor))
                self.made[storage._cdata] = StorageWeakRef(storage)
            if id(tensor) not in taken:
                self._given[id(tensor)] = weakref.ref(tensor)
        return made

    def note_literal(self, x: torch.Tensor) -> Any:
        """Return the operator that makes the tensor of ``torch.tensor([...])`` at each call.

        It copies from what nobody can write to. Memory that is shared (``torch.as_tensor`` of an
        array) may be new or not: it is read where it is.
        """
        if x.untyped_storage().resizable():
            self.literals.add(x.untyped_storage()._cdata)
            return torch.ops.aten.clone.default
        self.borrowed.add(x.untyped_storage()._cdata)
        return torch.ops.aten.lift_fresh.default

    def has_given(self, tensor: torch.Tensor) -> bool:
        """Return True if an operator of this run has returned the tensor, if only as a view."""
        ref = self._given.get(id(tensor))
        return ref is not None and ref() is tensor

    def note_read(self, tensor: torch.Tensor, number: int = 0, operator: str = "") -> None:
        """Record that the elements of a tensor from outside are touched, by which operator."""
        _touch(self.read, tensor)
        if operator:
            self.reads.note(number, operator, tensor)

    def note_written(self, tensor: torch.Tensor) -> None:
        """Record that the elements of a tensor from outside are written."""
        _touch(self.wrote, tensor)
        storage = tensor.untyped_storage()
        self.written[storage._cdata] = storage

    def is_written(self, addresses: range) -> bool:
        """Return True if operators write to some of ``addresses``, as replays do."""
        if not addresses:
            return False
        each = [range(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in self.written.values()]
        return any(addresses[0] in x or (x and x[0] in addresses) for x in each)

    def know(self, tensor: torch.Tensor) -> bool:
        """Return True for a tensor from outside, and keep its memory.

        Raises:
            GraphError: The memory has another size than when the run first saw it.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.made:
            return False
        _, nbytes = self._sizes.setdefault(key, (storage, storage.nbytes()))
        if key in self.empty:  # the function has filled it, and will empty it again
            self.made[key] = StorageWeakRef(storage)
            return False
        if nbytes != storage.nbytes():
            check_resized(nbytes, storage.nbytes())
        if key not in self.externals:  # its memory is what counts, not what it was computed from
            computed = tensor.requires_grad and node_of(tensor) is not None
            self.externals[key] = tensor.detach() if computed else tensor
        return True

    def is_outside(self, key: int) -> bool:
        """Return True for memory of the program, which may hold something else at each call."""
        if key in self.made or key in self.literals:
            return False
        return key not in self.constants or self.constants[key].expired()

    def check_sizes(self, *, may_empty: bool) -> None:
        """Raise for outside memory that has another size now, except what each run empties.

        What one run leaves empty the next one fills itself, as FSDP does with gathered parameters.
        ``may_empty``: whether this run may be the first to empty it.
        """
        for key, (storage, nbytes) in self._sizes.items():
            now = storage.nbytes()
            if key in self.empty:
                if now:
                    check_resized(0, now)
            elif now != nbytes:
                if now or not may_empty:
                    check_resized(nbytes, now)
                self.emptied.add(key)


def _touch(spans: dict[int, Span], tensor: torch.Tensor) -> None:
    if tensor.numel():
        key, (begin, end) = tensor.untyped_storage()._cdata, span(tensor)
        low, high = spans.get(key, (begin, end))
        spans[key] = min(low, begin), max(high, end)
