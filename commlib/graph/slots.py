"""A captured call with gradients: a forward and a backward graph a slot, joined by one node."""

import functools
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from commlib.errors import GraphError
from commlib.graph.engine import Engine
from commlib.graph.entry import Entry, Tensors
from commlib.graph.ledger import Ledger
from commlib.graph.outputs import Join
from commlib.graph.pieces import Pieces
from commlib.graph.signature import Arguments


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
        super()._capture(call, again=again or self._later)
        with self._waiting():  # a leaf has the one node that is held
            self._ends = [get_gradient_edge(leaf) for leaf in self._parameters]

    def _inputs(self, given: Tensors) -> Tensors:
        """Leaves over the same memory: the backward ends there, not in the caller's past."""
        return [leaf(tensor) for tensor in given]

    def _behind(self, result: Any, inputs: Tensors, *, again: bool) -> None:
        made = self.outputs.made(result)
        self._leads = [tensor.requires_grad for tensor in made]
        outs = [tensor for tensor in made if tensor.requires_grad]
        wanted = [tensor for tensor in (*inputs, *self._parameters) if tensor.requires_grad]
        self._given_grads = [torch.zeros_like(tensor) for tensor in outs]
        self._release_backward()
        # Retained: a second replay of the backward needs what the forward has saved, unwritten.
        self._backward, grads = self._make(
            lambda: torch.autograd.grad(
                outs, wanted, self._given_grads, retain_graph=True, allow_unused=True
            ),
            again=again,
            part="backward",
        )
        tensors = (*inputs, *self._parameters)
        places = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        self._wanting = len(tensors)
        self._grads: dict[int, torch.Tensor] = {  # by position
            i: grad for i, grad in zip(places, grads, strict=True) if grad is not None
        }

    # -- replaying ---------------------------------------------------------------------------------

    def _join(self, tensors: Sequence[torch.Tensor]) -> Join:
        lease = _Lease()
        self._lease = weakref.ref(lease)

        def join(lent: list[torch.Tensor]) -> Any:
            return _Node.apply(self, lease, lent, *tensors, *self._parameters)  # type: ignore[no-untyped-call]

        return join

    def all_came(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether a backward has come through every output that has one."""
        return all(x is not None for x, leads in zip(grads, self._leads, strict=True) if leads)

    def not_differentiable(self, lent: Sequence[torch.Tensor]) -> Tensors:
        """Return the outputs that no gradient comes back through."""
        return [tensor for tensor, leads in zip(lent, self._leads, strict=True) if not leads]

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay the backward with the gradients of the outputs; returns fresh tensors."""
        if self._backward is None:
            raise GraphError("the graph of this backward was released before it ran")
        coming = [grad for grad, leads in zip(grads, self._leads, strict=True) if leads]
        fresh = {i: torch.empty_like(grad) for i, grad in self._grads.items()}
        with self._backward.lock:
            self._backward.turn()
            for kept, grad in zip(self._given_grads, coming, strict=True):
                if grad is None:
                    kept.zero_()
                else:
                    kept.copy_(grad)
            self._backward.replay()
            if fresh:
                torch._foreach_copy_([*fresh.values()], [*self._grads.values()])
        return [fresh.get(i) for i in range(self._wanting)]

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


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf over the memory of a tensor that wants a gradient, else the tensor."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def parameters(ledger: Ledger, inputs: Sequence[torch.Tensor]) -> Tensors:
    """Return the leaves that a run has read beside its inputs and that want a gradient."""
    given = {id(tensor) for tensor in inputs}
    known = (reference() for reference in ledger.leaves.values())
    return [tensor for tensor in known if tensor is not None and id(tensor) not in given]
