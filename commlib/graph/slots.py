"""A captured call with gradients: a forward and a backward graph a slot, joined by one node."""

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from commlib.errors import GraphError
from commlib.graph.engine import Engine
from commlib.graph.entry import Entry
from commlib.graph.leaves import Tensors, gradients, leaf, plain_gradients
from commlib.graph.outputs import Join
from commlib.graph.pieces import Pieces
from commlib.graph.signature import Arguments, any_autocast


class Slots:
    """All slots of one kind of call: as many as there are forwards still to go back."""

    def __init__(self, build: Callable[..., "Slot"], call: Arguments) -> None:
        self._build = build
        self.slots = [build(call, later=False)]
        self._failed = False  # whether one more could not be captured
        self._lock = self.slots[0].pieces.lock

    def first(self, call: Arguments, caller: FrameType) -> Any:
        """Do what the capture itself has not done, and return the outputs."""
        return self.slots[0].first(call, caller)

    def run(self, call: Arguments, caller: FrameType) -> Any:
        """Replay the forward of a free slot; the gradients of its outputs lead to its backward."""
        with self._lock:
            for slot in self.slots:
                if slot.free:
                    return slot.run(call, caller)
            self._failed = True
            self.slots.append(self._build(call, later=True))
            self._failed = False
            return self.slots[-1].first(call, caller)

    @property
    def parts(self) -> list[Entry]:
        """The slots as entries of a report."""
        return list(self.slots)

    def drop_lost(self) -> bool:
        """Drop slots that have lost their graphs; says whether one has, or was never made."""
        kept = [slot for slot in self.slots if not slot.lost]
        lost, self._failed = self._failed or len(kept) < len(self.slots), False
        self.slots = kept
        return lost

    def release(self) -> None:
        """Let go of every graph."""
        for slot in self.slots:
            slot.release()


class _Lease:
    """Held by the autograd node of one forward: its slot is free when it is gone."""

    __slots__ = ("__weakref__", "reads", "versions")

    def __init__(self) -> None:
        self.reads: list[torch.Tensor] = []  # that the backward needs as they were
        self.versions: list[int] = []  # of these then


class Slot(Entry):
    """One forward graph, its backward graph, and the memory between them."""

    def __init__(
        self,
        fn: Callable[..., Any],
        call: Arguments,
        make: Callable[..., tuple[Pieces, Any]],
        engine: Engine,
        parameters: Sequence[torch.Tensor],
        *,
        copy: bool,
        own: bool,
        eager_seconds: float | None,
        later: bool,
    ) -> None:
        self._parameters, self._later, self._waiting = list(parameters), later, engine.waiting
        self._lease: weakref.ref[_Lease] | None = None
        self._backward: Pieces | None = None
        # What lies between forward and backward is in a pool of their own.
        made = functools.partial(make, pool=engine.own_pool())
        super().__init__(fn, call, made, (), copy=copy, own=own, eager_seconds=eager_seconds)

    @property
    def graphs(self) -> list[Pieces]:
        """The forward, and its backward."""
        return [self.pieces, *([] if self._backward is None else [self._backward])]

    @property
    def free(self) -> bool:
        """Whether no node waits for its backward."""
        return self._lease is None or self._lease() is None

    # -- capturing ---------------------------------------------------------------------------------

    def _capture(self, call: Arguments, *, again: bool) -> None:
        # A failed capture leaves autograd nodes in reference cycles. They belong to another stream,
        # and a leaf whose node is still there gets no new one.
        gc.collect()
        with self._waiting():  # a leaf has the one node that is held
            self._ends = [get_gradient_edge(leaf) for leaf in self._parameters]
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
            saved.add(x.untyped_storage()._cdata)
            return x.data

        return saved_tensors_hooks(pack, lambda x: x)

    def _behind(self, result: Any, inputs: Tensors, *, again: bool) -> None:
        made = self.outputs.made(result)
        self._leads = [tensor.requires_grad for tensor in made]
        outs = [tensor for tensor in made if tensor.requires_grad]
        wanted = [tensor for tensor in (*inputs, *self._parameters) if tensor.requires_grad]
        self._given_grads = [torch.zeros_like(tensor) for tensor in outs]
        self._release_backward()
        self._outs, self._wanted = outs, wanted  # with what the forward has saved
        self._backward, grads = self._make(
            lambda: plain_gradients(outs, wanted, self._given_grads), again=again, part="backward"
        )
        self._note_reads(made, inputs)
        tensors = (*inputs, *self._parameters)
        places = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        self._tensors, self._wanting = tensors, len(tensors)
        self._grads: dict[int, torch.Tensor] = {  # by position
            i: grad for i, grad in zip(places, grads, strict=True) if grad is not None
        }

    def _note_reads(self, made: Tensors, inputs: Tensors) -> None:
        """Know what the forward has saved and the backward reads: nobody may write to it between.

        What a hook reads beside that is to be as it is then.
        """
        assert self._backward is not None
        ledgers = (*self.pieces.ledgers, *self._backward.ledgers)
        written = {key for ledger in ledgers for key in ledger.saved}
        read = {
            key: tensor
            for ledger in self._backward.ledgers
            for key, tensor in ledger.externals.items()
            if key in self._saved and key not in written
        }
        places = [x.untyped_storage()._cdata for x in inputs]
        self._reads_inputs = [
            i for i, key in enumerate(places) if key in read and i not in self._own
        ]
        lent = [x.untyped_storage()._cdata for x in made] if not self._copy else []
        self._reads_outputs = [i for i, key in enumerate(lent) if key in read]
        for ledger in self.pieces.ledgers:  # the program's own tensors, whose versions count
            read |= {key: x for key, x in ledger.externals.items() if key in read}
        of_graph = {*places, *lent, *(x.untyped_storage()._cdata for x in self._given_grads)}
        self._reads = [
            tensor
            for key, tensor in read.items()
            if key not in of_graph and not self.pieces.has_made(tensor)
        ]

    # -- replaying ---------------------------------------------------------------------------------

    def _join(self, tensors: Sequence[torch.Tensor]) -> Join:
        lease = _Lease()
        self._lease = weakref.ref(lease)

        def join(lent: list[torch.Tensor]) -> Any:
            outs = _Node.apply(self, lease, lent, *tensors, *self._parameters)  # type: ignore[no-untyped-call]
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
                "go back before that, or clone it"
            )

    def all_came(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether a backward has come through every output that has one."""
        return all(x is not None for x, leads in zip(grads, self._leads, strict=True) if leads)

    def not_differentiable(self, lent: Sequence[torch.Tensor]) -> Tensors:
        """Return the outputs that no gradient comes back through."""
        return [tensor for tensor, leads in zip(lent, self._leads, strict=True) if not leads]

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay the backward with the gradients of the outputs; returns fresh tensors.

        Where some do not come, or under autocast, it is another backward than the captured one: it
        runs eagerly over what the forward has saved.
        """
        if self._backward is None:
            raise GraphError("the graph of this backward was released before it ran")
        wanted = [grad for grad, leads in zip(grads, self._leads, strict=True) if leads]
        coming = [grad for grad in wanted if grad is not None]
        if len(coming) < len(wanted) or any_autocast():
            return self._eagerly(wanted)
        fresh = {i: torch.empty_like(grad) for i, grad in self._grads.items()}
        with self._backward.lock:
            self._backward.turn()
            for kept, grad in zip(self._given_grads, coming, strict=True):
                kept.copy_(grad)
            self._backward.replay()
            if fresh:
                torch._foreach_copy_([*fresh.values()], [*self._grads.values()])
        return [fresh.get(i) for i in range(self._wanting)]

    def _eagerly(self, coming: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Go back from some of the outputs: what the forward has saved is where it was captured."""
        assert self._backward is not None
        outs = [out for out, grad in zip(self._outs, coming, strict=True) if grad is not None]
        grads = [grad for grad in coming if grad is not None]
        with self._backward.lock:
            self._backward.turn()
            found = iter(gradients(outs, self._wanted, grads))
        wants = [tensor.requires_grad for tensor in self._tensors]
        return [next(found) if each else None for each in wants]

    def release(self) -> None:
        """Let go of both graphs."""
        super().release()
        self._release_backward()

    def _release_backward(self) -> None:
        if self._backward is not None:
            self._backward.release()
            self._backward = None


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
        if torch.is_grad_enabled():  # create_graph=True
            return _refusing_more(ctx, *grads)
        return None, None, None, *_gone_back(ctx, grads)


@once_differentiable
def _refusing_more(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
    return None, None, None, *_gone_back(ctx, grads)


def _gone_back(ctx: Any, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replay a node's backward, and free its slot when no other can come through it."""
    slot: Slot | None = ctx.slot
    if slot is None:
        raise GraphError(
            "a second backward through one call; type retain_graph=True in the first one"
        )
    slot.check(ctx.lease)
    found = slot.backward(grads)
    if not _retains() and slot.all_came(grads) and all(map(_runs, ctx.next_functions)):
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
