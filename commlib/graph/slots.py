"""A captured call with gradients: a forward and a backward graph a slot, joined by one node."""

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from commlib.core.tensors import parts, rebuilt
from commlib.errors import GraphError
from commlib.graph.backend import Backend
from commlib.graph.backward import Backward
from commlib.graph.cache_key import Arguments, any_autocast, modes
from commlib.graph.captured_call import CapturedCall, Known
from commlib.graph.effects import Effects
from commlib.graph.host import OtherValue
from commlib.graph.leaves import Tensors, gradients, leaf, plain_gradients
from commlib.graph.nodes import used_up
from commlib.graph.outputs import Join
from commlib.graph.schedule import Schedule
from commlib.graph.segments import Segments
from commlib.graph.side_stream import SideStream
from commlib.graph.verify import Unequal


class Slots:
    """All slots of one kind of call: as many as there are forwards still to go back."""

    def __init__(
        self,
        build: Callable[..., "Slot"],
        call: Arguments,
        fn: Callable[..., Any],
        schedule: Schedule,
    ) -> None:
        self._build, self._fn, self._schedule = build, fn, schedule
        self.replays = 0
        self.slots = [build(call, later=False)]
        self.places: dict[Any, Any] = {}  # as an entry's
        self._failed = False  # whether one more could not be captured
        self._lock = self.slots[0].segments.lock

    def run(self, call: Arguments, caller: FrameType, turn: int) -> Any:
        """Replay the forward of a free slot; the gradients of its outputs lead to its backward.

        ``turn``: as that of an ``CapturedCall``.
        """
        self.replays += 1
        together = any(segments.collectives for segments in self.slots[0].graphs)
        if self._schedule.due(turn if together else self.replays) and self.slots[0].fits_all:
            return self._verified(call, caller)
        return self._replayed(call, caller)[1]

    def _verified(self, call: Arguments, caller: FrameType) -> Any:
        """Run the function for real and a forward after that; its backward will be verified too."""
        one = self.slots[0]
        one.check_call(call)
        one.order()
        writes = {key: each for slot in self.slots for key, each in slot.writes(call).items()}
        args, kwargs = call.given
        used: list[Slot] = []

        def replay() -> Any:
            slot, found = self._replayed(call, caller)
            used.append(slot)
            return found

        effects = one.effects(call)
        all_slots = Effects(writes.values(), effects.generators, effects.leaves)
        verification = one.verification("output", one.segments, call)._replace(effects=all_slots)
        verified = verification.run(lambda: self._fn(*args, **kwargs), replay)
        one.note_verified(verified)
        if not verified.replayed:  # the graph is of other values than this call, or of noise
            return verified.expected
        slot, expected = used[0], verified.expected
        wanted = [x for x in (*call.tensors, *slot.parameters) if x.requires_grad]
        outs = [x for x in slot.outputs.made(expected) if x.requires_grad]
        slot.expect(outs, wanted, uncaptured=one.uncaptured)
        one.uncaptured = False
        return verified.found

    def _replayed(self, call: Arguments, caller: FrameType) -> "tuple[Slot, Any]":
        """Return the slot that was used, and the outputs."""
        with self._lock:
            for slot in self.slots:
                if slot.free:
                    return slot, slot.run(call, caller, 0)
            self._failed = True
            try:
                self.slots.append(self._build(call, later=True))
            except OtherValue:
                self._failed = False
                raise
            self._failed = False
            return self.slots[-1], self.slots[-1].first(call, caller)

    @property
    def stale(self) -> bool:
        """Return True if the program has released a tensor that a slot reads."""
        return any(slot.stale for slot in self.slots)

    def uses(self, key: int) -> bool:
        """Return as an entry does."""
        return self.slots[0].uses(key)

    @property
    def has_eager_parts(self) -> bool:
        """Return True if Python runs between its graphs."""
        return any(slot.has_eager_parts for slot in self.slots)

    @property
    def parts(self) -> list[CapturedCall]:
        """The slots as entries of a report."""
        return list(self.slots)

    def drop_lost(self) -> bool:
        """Drop slots that have lost their graphs; says whether one has, or was never made."""
        kept = [slot for slot in self.slots if not slot.lost]
        lost, self._failed = self._failed or len(kept) < len(self.slots), False
        self.slots = kept
        return lost

    def release(self) -> None:
        """Release every graph."""
        for slot in self.slots:
            slot.release()


class _Lease:
    """Held by the autograd node of one forward: its slot is free when it is gone."""

    __slots__ = ("__weakref__", "expected", "reads", "side", "uncaptured", "versions")

    def __init__(self, side: SideStream | None) -> None:
        self.side = side  # of the node; None if the node belongs to the caller's stream
        # Of a verified call: outputs of the function itself, and what gradients are wanted of.
        self.expected: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
        self.uncaptured = False  # whether the forward was verified with the answer "not captured"
        self.reads: list[torch.Tensor] = []  # that the backward needs as they were
        self.versions: list[int] = []  # of these then


class Slot(CapturedCall):
    """One forward graph, its backward graph, and the memory between them."""

    def __init__(
        self,
        fn: Callable[..., Any],
        call: Arguments,
        make: Callable[..., tuple[Segments, Any]],
        engine: Backend,
        parameters: Sequence[torch.Tensor],
        known: Known,
        *,
        differs: Callable[[Unequal], None],
        later: bool,
    ) -> None:
        """``differs`` gets a backward that differs from the function's; it may raise."""
        self._differs = differs
        self.parameters, self._later, self._waiting = list(parameters), later, engine.waiting
        self._side = engine.side()
        self._lease: weakref.ref[_Lease] | None = None
        # By the outputs whose gradients come, and the autocast that the backward is called under.
        self._backwards: dict[Any, Backward] = {}
        # What is between forward and backward is in their own pool.
        made = functools.partial(make, pool=engine.own_pool())
        super().__init__(fn, call, made, (), known, Schedule(False))

    @property
    def graphs(self) -> list[Segments]:
        """The forward, and its backwards."""
        return [self.segments, *(backward.segments for backward in self._backwards.values())]

    @property
    def free(self) -> bool:
        """Whether no node waits for its backward."""
        return self._lease is None or self._lease() is None

    # -- capturing ---------------------------------------------------------------------------------

    def _capture(self, call: Arguments, *, again: bool) -> None:
        with self._waiting():  # a leaf has the one node that is held
            self._ends = [get_gradient_edge(leaf) for leaf in self.parameters]
        super()._capture(call, again=again or self._later)

    def _inputs(self, given: Tensors) -> Tensors:
        """Leaves over the same memory: the backward ends there, not in the caller's past."""
        return [leaf(tensor) for tensor in given]

    def _saving(self) -> AbstractContextManager[object]:
        """Save memory, whatever is written there later: a replay of the forward comes between."""
        saved = self._saved = set[int]()  # memory

        # Autograd's graph holds this function, and the slot holds that graph: a reference to the
        # slot would close a cycle that the garbage collector can't see.
        def pack(x: torch.Tensor) -> torch.Tensor:
            saved.update(part.untyped_storage()._cdata for part in parts(x))
            found: torch.Tensor = rebuilt(x, lambda part: part.data)
            return found

        return saved_tensors_hooks(pack, lambda x: x)

    def _behind(self, result: Any, inputs: Tensors, *, again: bool) -> None:
        made = self.outputs.made(result)
        self._leads = [tensor.requires_grad for tensor in made]
        outs = [tensor for tensor in made if tensor.requires_grad]
        wanted = [tensor for tensor in (*inputs, *self.parameters) if tensor.requires_grad]
        self._release_backwards()
        self._outs, self._wanted = outs, wanted  # with what the forward has saved
        tensors = (*inputs, *self.parameters)
        self._tensors, self._wanting = tensors, len(tensors)
        every = (True,) * len(outs)
        self._backwards[every, None] = whole = self._capture_backward(
            every, plain_gradients, again=again
        )
        self._note_reads(whole, made, inputs)

    def _capture_backward(
        self, comes: tuple[bool, ...], go_back: Callable[..., Any], *, again: bool
    ) -> Backward:
        """Capture the backward from those outputs whose gradients come.

        An eager backward can't go over what a capture has saved: some kernels keep numbers on the
        GPU then that they read on the host.
        """
        outs = [out for out, one in zip(self._outs, comes, strict=True) if one]
        given = [torch.zeros_like(out) for out in outs]
        segments, grads = self._make(
            lambda: go_back(outs, self._wanted, given),
            again=again,
            part=f"backward from {comes}",
            before=self.segments,
        )
        places = [i for i, tensor in enumerate(self._tensors) if tensor.requires_grad]
        found = zip(places, grads, strict=True)
        others = [out for out, one in zip(self._outs, comes, strict=True) if not one]
        there = {i: grad for i, grad in found if grad is not None}
        return Backward(segments, given, there, last=used_up(outs, others))

    def _note_reads(self, whole: Backward, made: Tensors, inputs: Tensors) -> None:
        """Know what the forward has saved and the backward reads: nobody may write to it between.

        Other inputs of a hook must be as they are then.
        """
        recorders = (*self.segments.recorders, *whole.segments.recorders)
        written = {key for recorder in recorders for key in recorder.written}
        read = {
            key: tensor
            for recorder in whole.segments.recorders
            for key, tensor in recorder.externals.items()
            if key in self._saved and key not in written
        }
        places = [x.untyped_storage()._cdata for x in inputs]
        self._reads_inputs = [
            i for i, key in enumerate(places) if key in read and i not in self._own
        ]
        lent = [x.untyped_storage()._cdata for x in made] if not self._copy else []
        self._reads_outputs = [i for i, key in enumerate(lent) if key in read]
        for recorder in self.segments.recorders:  # the program's own tensors, whose versions count
            read |= {key: x for key, x in recorder.externals.items() if key in read}
        of_graph = {*places, *lent, *(x.untyped_storage()._cdata for x in whole.given)}
        self._reads = [
            tensor
            for key, tensor in read.items()
            if key not in of_graph and not self.segments.has_made(tensor)
        ]

    # -- replaying ---------------------------------------------------------------------------------

    def _join(self, tensors: Sequence[torch.Tensor]) -> Join:
        lease = _Lease(self._side if self._side is not None and self._side.serves() else None)
        self._lease = weakref.ref(lease)

        def join(lent: list[torch.Tensor]) -> Any:
            with nullcontext() if lease.side is None else lease.side.current():
                outs = _Node.apply(self, lease, lent, *tensors, *self.parameters)  # type: ignore[no-untyped-call]
            lease.reads = [*self._reads, *(tensors[i] for i in self._reads_inputs)]
            lease.versions = self._versions(lease)
            return outs

        return join

    def _versions(self, lease: _Lease) -> list[int]:
        """Return how often what the backward reads was written to, as autograd counts."""
        seen = [tensor._version for tensor in lease.reads]
        return seen + self.outputs.versions(self._reads_outputs) if self._reads_outputs else seen

    def check(self, lease: _Lease) -> None:
        """Raise ``GraphError`` where something was written to that the backward is to read."""
        if self._versions(lease) != lease.versions:
            raise GraphError(
                "a tensor that this backward needs was modified in place since its forward; "
                "run the backward before modifying the tensor, or clone the tensor"
            )

    def is_last(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether no other backward can follow the one with these gradients."""
        return self._backward_of(self._of_leading(grads)).last

    def _of_leading(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients of those outputs that have one."""
        return [grad for grad, leads in zip(grads, self._leads, strict=True) if leads]

    def not_differentiable(self, lent: Sequence[torch.Tensor]) -> Tensors:
        """Return the outputs that no gradient comes back through."""
        return [tensor for tensor, leads in zip(lent, self._leads, strict=True) if not leads]

    def expect(
        self, outs: list[torch.Tensor], wanted: list[torch.Tensor], *, uncaptured: bool
    ) -> None:
        """Verify the backward of the forward that was just replayed, with that of ``outs``."""
        lease = None if self._lease is None else self._lease()
        if lease is not None:
            lease.expected, lease.uncaptured = (outs, wanted), uncaptured

    def verified_backward(
        self, lease: _Lease, grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Go back through the function's own outputs, and replay the backward after that."""
        assert lease.expected is not None
        outs, wanted = lease.expected
        given = self._of_leading(grads)
        coming = [(out, grad) for out, grad in zip(outs, given, strict=True) if grad is not None]
        segments = self._backward_of(given).segments
        wants = [tensor.requires_grad for tensor in self._tensors]
        back = functools.partial(self.backward, grads, lease.side)
        try:
            verification = self.verification("gradient", segments, None)
            verified = verification._replace(uncaptured=lease.uncaptured).run(
                lambda: list(gradients([o for o, _ in coming], wanted, [g for _, g in coming])),
                lambda: [x for x, each in zip(back(), wants, strict=True) if each],
            )
            found, forward = verified.found, self.eager_seconds or 0
            self.note_verified(verified)
            self.eager_seconds = forward + verified.eager_seconds
        except Unequal as error:
            self._differs(error)
            found = error.result
        each_found = iter(found)
        return [next(each_found) if each else None for each in wants]

    def backward(
        self, grads: Sequence[torch.Tensor | None], side: SideStream | None
    ) -> list[torch.Tensor | None]:
        """Replay the backward with the gradients of the outputs; returns fresh tensors.

        ``side``: the current stream, if that is not the caller's.
        """
        wanted = self._of_leading(grads)
        fresh = self._backward_of(wanted).run([grad for grad in wanted if grad is not None], side)
        return [fresh.get(i) for i in range(self._wanting)]

    def _backward_of(self, grads: Sequence[torch.Tensor | None]) -> Backward:
        """Return the backward from those outputs whose gradients come; the first time, capture it.

        Raises ``GraphError`` if the graphs were released.
        """
        if not self._backwards:
            raise GraphError("the graph of this backward was released before it ran")
        comes = tuple(grad is not None for grad in grads)
        key = comes, modes() if any_autocast() else None
        if key not in self._backwards:
            go_back = gradients if any_autocast() else plain_gradients
            self._backwards[key] = self._capture_backward(comes, go_back, again=True)
        return self._backwards[key]

    def release(self) -> None:
        """Release all graphs."""
        super().release()
        self._release_backwards()

    def _release_backwards(self) -> None:
        for backward in self._backwards.values():
            backward.segments.release()
        self._backwards.clear()


class _Node(torch.autograd.Function):
    """The one autograd node of a captured forward."""

    @staticmethod
    def forward(
        ctx: Any, slot: Slot, lease: _Lease, lent: list[torch.Tensor], *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.slot, ctx.lease = slot, lease
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*slot.not_differentiable(lent))
        return tuple(lent)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            found = _gone_back(ctx, grads)
        if torch.is_grad_enabled():  # create_graph=True
            found = _refusing_more(found)
        return None, None, None, *found


def _refusing_more(grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return gradients that raise where something is derived from them: no graph has that."""
    there = [grad.requires_grad_() for grad in grads if grad is not None]
    refuses = torch._C._functions.DelayedError(
        "a captured call has no second derivatives (create_graph=True, gradient penalties); call "
        "the function itself where they are needed",
        len(there),
    )
    marked = refuses(*there)
    each = iter(marked if isinstance(marked, tuple) else (marked,))
    return [None if grad is None else next(each) for grad in grads]


def _gone_back(ctx: Any, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replay a node's backward, and free its slot when no other can come through it."""
    slot: Slot | None = ctx.slot
    if slot is None:
        raise GraphError(
            "second backward through one call; pass retain_graph=True to the first backward"
        )
    slot.check(ctx.lease)
    lease = ctx.lease
    if lease.expected is None:
        found = slot.backward(grads, lease.side)
    else:
        found = slot.verified_backward(lease, grads)
    if not _retains() and all(map(_runs, ctx.next_functions)) and slot.is_last(grads):
        ctx.slot = ctx.lease = None
    return found


# Whether a backward goes on to a node, and whether it keeps the graph for another one; where torch
# can't tell, as if there were another.
_will_run: Callable[[Any], bool] = getattr(
    torch._C, "_will_engine_execute_node", lambda node: False
)
_retains: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def _runs(edge: tuple[Any, int]) -> bool:
    """Whether the backward under way takes this way out of a node, if there is one."""
    node, _ = edge
    try:
        return node is None or _will_run(node)
    except RuntimeError:  # a leaf that autograd.grad has asked for
        return True
