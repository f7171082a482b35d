"""A real call of a function, observed: its writes, draws and results; nothing is rejected."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from commlib.core import observers
from commlib.core.compiler import untraced_function
from commlib.core.ring import Ring
from commlib.core.tensors import fault
from commlib.graph.operators.generators import default_generator, generators_of
from commlib.graph.operators.higher_order import check_higher_order
from commlib.graph.operators.history import is_leaf
from commlib.graph.operators.schema import OpCall, memory
from commlib.graph.operators.step import FAKE, mode_of, tensors_in
from commlib.graph.watching.outside_reads import OutsideReads
from commlib.graph.watching.undo import UndoLog

_clone = torch.ops.aten.clone.default


class RealCall(TorchDispatchMode):
    """Watch one run; ``undo`` then holds what it has changed outside itself.

    Attributes:
        undo: Memory and generators from outside, as they were before the run.
        rings: The rings of its collectives, by number.
        names: Its operators in order, with their plain arguments, where they are asked for.
        reads: What each of them reads from outside, where names are asked for.
    """

    refuses = False
    supports_higher_order_operators = True

    def __init__(
        self,
        device: torch.device,
        writes: Iterable[torch.UntypedStorage],
        *,
        copies: bool = True,
        named: bool = False,
        undo: UndoLog | None = None,
    ) -> None:
        """Copy at once what is written outside the view of torch's operators: ``writes``.

        With ``copies=False`` nothing is copied, and memory can't be put back. ``named``: whether
        ``names`` is asked for. ``undo`` is a log that goes on.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._copies, self._named = device, copies, named
        self.made: dict[int, StorageWeakRef] = {}
        self._given: dict[int, weakref.ref[torch.Tensor]] = {}  # by an operator, by id
        self._nested = False
        self.undo = UndoLog() if undo is None else undo
        self.written: set[int] = set()  # memory
        self.rings: dict[int, Ring] = {}
        self.names: list[str] = []
        self.reads = OutsideReads()
        for storage in writes:
            self.undo.note_memory(storage)
        for kind in {"cpu", device.type}:
            self.undo.note_generator(default_generator(device if kind == device.type else kind))

    def note_leaves(self, leaves: Iterable[torch.Tensor]) -> None:
        """Record the gradients of leaves before the run, which may drop them at once."""
        for leaf in leaves:
            self.undo.note_leaf(leaf)

    def run(self, fn: Callable[[], Any]) -> Any:
        """Return ``fn()``; every Work that it began has ended."""
        with observers.unwaited() as works, self:
            result = fn()
        for work in works:
            work.wait()
        return result

    def __enter__(self) -> "RealCall":
        observers.observers.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        observers.observers.remove(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the handler is ``untraced_function``

    @untraced_function
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if mode_of(FAKE) is not None:
            return func(*args, **kwargs)
        if not isinstance(func, OpOverload) and isinstance(func, HigherOrderOperator):
            check_higher_order(func)
        call = OpCall(func, args, kwargs)
        tensors = call.tensors
        if types and any(fault(x, "it") for x in tensors):
            return NotImplemented  # a wrapper's own operators on what it holds follow
        if call.known.lifts and self._fresh(tensors[0]):
            call = OpCall(_clone, args, kwargs)
        if call.known.reshapes and not self._has_given(tensors[0]):
            self.undo.note_shape(tensors[0])
        for tensor in tensors:
            if tensor.requires_grad and is_leaf(tensor):
                self.undo.note_leaf(tensor)
        if call.known.writes or call.known.unsaid:
            for tensor in call.written:
                self._note(tensor)
        if call.known.draws or call.known.generator:
            for generator in generators_of(call, self._device):
                self.undo.note_generator(generator)
        if self._named and not call.known.detaches:
            self._note_reads(call)
            self.names.append(str(call))
        result = call.func(*args, **kwargs) if call.known.own else self._called(call)
        if call.known.lists:
            torch.autograd.graph.increment_version(call.written)
        taken = set(map(id, tensors))
        for tensor in tensors_in(result):
            if id(tensor) not in taken:
                self._given[id(tensor)] = weakref.ref(tensor)
            key = memory(tensor)
            if key and key not in call.memory:
                self.made[key] = StorageWeakRef(tensor.untyped_storage())
        return result

    def _note_reads(self, call: OpCall) -> None:
        """Record what an operator reads from outside."""
        for tensor, key in zip(call.tensors, call.memory, strict=False):
            if key and not call.known.only_views and not self.has_made(tensor.untyped_storage()):
                self.reads.note(len(self.names), call.known.text, tensor)

    def _called(self, call: OpCall) -> Any:
        """Run an operator that is not torch's; a collective inside it is a part of it."""
        before, self._nested = self._nested, True
        try:
            with observers.still_watched(self):
                return call.func(*call.args, **call.kwargs)
        finally:
            self._nested = before

    def _fresh(self, tensor: torch.Tensor) -> bool:
        """Return True for what ``torch.tensor([...])`` has made; an array's is from outside."""
        return bool(tensor.untyped_storage().resizable())

    def before(self, call: observers.Seen) -> None:
        """Note a collective and what it writes."""
        self.rings[call.ring.ring_id] = call.ring
        if self._nested:
            return  # part of an operator, which has said what it writes
        if call.out is not None:
            self._note(call.out)

    def before_read(self, tensor: torch.Tensor, name: str) -> None:
        """Do nothing: the run may read what it likes."""

    def begins_grads(self) -> bool:
        """Return True if a leaf whose ``grad`` was None before the run has one now."""
        return any(grad is None and x.grad is not None for x, grad in self.undo.grads)

    def has_made(self, storage: torch.UntypedStorage) -> bool:
        """Return True if the run has made ``storage``, and it is still there."""
        ref = self.made.get(storage._cdata)
        return ref is not None and not ref.expired()

    def _has_given(self, tensor: torch.Tensor) -> bool:
        """Return True if an operator of this run has returned the tensor, if only as a view."""
        ref = self._given.get(id(tensor))
        return ref is not None and ref() is tensor

    def _note(self, tensor: torch.Tensor) -> None:
        if not memory(tensor):
            return  # sparse: its parts are written as their own tensors
        self.written.add(memory(tensor))
        if self._copies and not self.has_made(tensor.untyped_storage()):
            self.undo.note_write(tensor)
