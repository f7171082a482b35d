"""Recorder of one run: tensors from outside, writes, random numbers, collectives."""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from operator import methodcaller
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from commlib.core import observers
from commlib.core.compiler import untraced_function
from commlib.core.ring import Ring
from commlib.core.tensors import fault, is_wrapper, parts
from commlib.graph.operators.generators import default_generator
from commlib.graph.operators.higher_order import check_higher_order
from commlib.graph.operators.history import is_leaf, node_of
from commlib.graph.operators.literals import made_on_host
from commlib.graph.operators.nested import watching_replays
from commlib.graph.operators.one_hot import checking_each
from commlib.graph.operators.schema import OpCall
from commlib.graph.operators.step import FAKE, Step, as_they_are, mode_of, tensors_in
from commlib.graph.operators.unsupported import (
    check_borrowed,
    check_layouts,
    check_reshaping,
    check_stray,
    check_sync,
    check_value,
    check_wrappers,
)
from commlib.graph.operators.value_reads import OF_A_LIST, watching_reads
from commlib.graph.watching.host import HostPart, is_on_host
from commlib.graph.watching.recorded_collective import Collective
from commlib.graph.watching.rng_watch import RngWatch
from commlib.graph.watching.touched_memory import TouchedMemory
from commlib.graph.watching.undo import UndoLog

_again = methodcaller("again")


class Recorder(TorchDispatchMode):
    """Records a run; raises ``GraphError`` before an unsupported operator runs.

    Attributes:
        memory: What the run makes, reads and writes.
        random: The generators that it draws from.
        undo: What it has changed outside itself, as that was before.
        names: Operators with their plain arguments, in order.
        launches: How many compute something, as views and new memory don't.
        steps: Every operator with its tensors, where they are kept.
        collectives: Its collectives, in order.
        leaves: Leaves from outside that require grad, by id.
        computed: Tensors from outside that autograd has made, by id.
        host: What the host does before each launch, in a capture on a GPU.
    """

    refuses = supports_higher_order_operators = True

    def __init__(
        self,
        device: torch.device,
        *,
        keep: bool = False,
        drawn: Sequence[torch.Generator] | None = None,
        host: HostPart | None = None,
    ) -> None:
        """Prepare to record a run.

        Args:
            device: Where the function runs.
            keep: Whether every step stays, to be run again.
            drawn: The generators that the run before has drawn from, where there was one.
            host: Gets the host's part of a capture on a GPU. No memory of the GPU is copied then,
                and work on a stream outside the capture raises.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.keep, self.host = device, keep, host
        self.undo, self.memory = UndoLog(), TouchedMemory()
        self.random = RngWatch(device, drawn, self.undo, captured=host is not None)
        self.names: list[str] = []
        self.steps: list[Step] = []
        self.collectives: list[Collective] = []
        self.leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self.computed: dict[int, torch.Tensor] = {}
        self.launches, self._nested, self._reading = 0, False, ExitStack()

    # -- watching ----------------------------------------------------------------------------------

    def __enter__(self) -> "Recorder":
        self.random.begin()
        observers.observers.append(self)
        self._outer, observers.inside.recording = observers.inside.recording, self
        super().__enter__()  # type: ignore[no-untyped-call]
        self._reading.enter_context(watching_reads())
        if self.device.type != "cpu":
            self._reading.enter_context(made_on_host())
            self._reading.enter_context(watching_replays())
        else:
            self._reading.enter_context(checking_each())
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._reading.close()
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        observers.observers.remove(self)
        observers.inside.recording = self._outer
        if kind is None:
            self.random.end()
            self.memory.check_sizes(may_empty=self.host is None and self.device.type != "cpu")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the handler is ``untraced_function``

    @untraced_function
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if mode_of(FAKE) is not None:
            return func(*args, **(kwargs or {}))
        if not isinstance(func, OpOverload) and isinstance(func, HigherOrderOperator):
            check_higher_order(func)
        call = OpCall(func, args, kwargs or {})
        if call.known.lifts:
            call = OpCall(self.memory.note_literal(args[0]), args, kwargs or {})
        if types and self._are_wrapped(call):
            return NotImplemented  # the wrapper's own operators on what it holds follow
        written, op_info = self._note_taken(call), call.known
        drawn = self.random.note(call) if op_info.draws or op_info.generator else []
        on_host = self.host is not None and all(map(is_on_host, call.tensors))
        keep = (self.keep or on_host) and not op_info.reshapes
        if keep:  # as they are now: they may get another shape later
            args = as_they_are(call.args, self.memory.made)
            kwargs = as_they_are(call.kwargs, self.memory.made) if kwargs else {}
        name = str(call)
        plain = op_info.own and self.host is None
        result = call.func(*call.args, **call.kwargs) if plain else self._called(call, written)
        if op_info.lists:
            torch.autograd.graph.increment_version(written)
        results = tensors_in(result)
        check_layouts(call, results)
        made = self.memory.note_made(results, call)
        for generator in drawn:
            self.random.record_state(generator)
        changed = [tensor for _, tensor in made] + written
        if self.host is not None:
            check_stray(call, changed)
        if not op_info.detaches:
            self.names.append(name)
        on_host = on_host and all(map(is_on_host, changed))
        self.launches += op_info.computes and not on_host and any(map(torch.Tensor.numel, changed))
        if keep and (self.keep or (on_host and changed)):
            step = Step.of(call.func, args, kwargs, made, self.memory.made)
            if self.host is None:
                self.steps.append(step)
            else:
                self.host.note_step(step, written, draws=bool(drawn))
        return result

    def _are_wrapped(self, call: OpCall) -> bool:
        """Return True if an operator is called on wrappers, whose leaves are known from here on."""
        wrapped = [x for x in call.tensors if is_wrapper(x) and fault(x, "it") is not None]
        check_wrappers(call, [x for x in wrapped if not parts(x)])
        for tensor in wrapped:
            if tensor.requires_grad and is_leaf(tensor):
                self._know_leaf(tensor)
        return bool(wrapped)

    def _note_taken(self, call: OpCall) -> list[torch.Tensor]:
        """Check an operator, and record what it reads and writes; returns what it writes to."""
        op_info, made = call.known, self.memory.made
        check_layouts(call, call.tensors)
        if op_info.waits:
            check_sync(call, self.device)
        for tensor, key in zip(call.tensors, call.memory, strict=False):
            if key not in made and self._know(tensor) and not op_info.only_views:
                self.memory.note_read(tensor, len(self.names), op_info.text)
        if op_info.reshapes and not self.memory.has_given(call.args[0]):
            check_reshaping(call)
        written = call.written if op_info.writes or op_info.unsaid else []
        for tensor in written:
            if tensor.untyped_storage()._cdata in self.memory.borrowed:
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

    # -- what is not an operator -------------------------------------------------------------------

    def before_read(self, tensor: torch.Tensor, name: str) -> None:
        """Note a method that reads the values of a tensor, or raise."""
        if self.device.type == "cpu" or (name == OF_A_LIST and not is_on_host(tensor)):
            check_value(name)
        if self.host is not None and is_on_host(tensor):
            with observers.unwatched():
                self.host.note_read(tensor)

    def before(self, call: observers.Seen) -> None:
        """Note a collective; dispatch calls this before it launches."""
        if not self._nested:  # an operator has said what it reads and writes
            for tensor in tensors_in((call.x, call.out, call.args)):
                if self._know(tensor):
                    self.memory.note_read(tensor, len(self.names), "a collective")
            if call.out is not None:
                self._before_write(call.out)
        self.collectives.append(Collective.of(call))
        if self.keep and not self._nested:
            self.steps.append(Step(_again, (call,), {}, ()))

    def note_unseen(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record memory that the function writes, though no operator says so."""
        for tensor in tensors:
            if self._know(tensor):
                self.memory.note_read(tensor)
            self._before_write(tensor)

    # -- memory ------------------------------------------------------------------------------------

    def _know(self, tensor: torch.Tensor) -> bool:
        """Record a tensor; return True if it is from outside."""
        if not self.memory.know(tensor):
            return False
        if not tensor.requires_grad:
            return True
        if is_leaf(tensor):
            self._know_leaf(tensor)
        elif self.host is None and node_of(tensor) and not self.memory.has_given(tensor):
            self.computed.setdefault(id(tensor), tensor)
        return True

    def _know_leaf(self, tensor: torch.Tensor) -> None:
        """Keep a leaf. Several may share memory, as in flat buffers; own ones are dropped later."""
        ref = self.leaves.get(id(tensor))
        if ref is None or ref() is None:
            self.leaves[id(tensor)] = weakref.ref(tensor)
            if self.host is None:
                self.undo.note_leaf(tensor)

    def _before_write(self, tensor: torch.Tensor) -> None:
        """Record what is written, and copy its memory before the first write to it."""
        if tensor.untyped_storage()._cdata in self.memory.made:
            return
        self.memory.note_written(tensor)
        if self.host is None or is_on_host(tensor):
            self.undo.note_write(tensor)

    # -- after the run -----------------------------------------------------------------------------

    def end_host(self) -> None:
        """End the host's part. Raises ``GraphError`` if no graph can fit what it reads."""
        assert self.host is not None
        self.host.end(self.memory, self.random.generators.values())

    def note_again(self, undo: UndoLog) -> None:
        """Let ``undo`` note what the run changes, for a run that is not observed."""
        for storage in self.memory.written.values():
            undo.note_memory(storage)
        for generator in self.random.generators.values():
            undo.note_generator(generator)
        for leaf in self.known_leaves():
            undo.note_leaf(leaf)

    def known_leaves(self) -> list[torch.Tensor]:
        """Return the leaves from outside that the run has read and that are still there."""
        return [
            leaf for ref in self.leaves.values() if (leaf := ref()) is not None and is_leaf(leaf)
        ]

    def restore(self) -> None:
        """Restore memory from outside, and generators, to their state before the run."""
        self.undo.restore()

    @property
    def rings(self) -> list[Ring]:
        """Return the rings of the collectives, by number."""
        return [x for _, x in sorted({x.ring.ring_id: x.ring for x in self.collectives}.items())]
