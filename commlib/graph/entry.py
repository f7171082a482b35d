"""One captured key: its graphs, the tensors they read, and how a call uses them."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from commlib.errors import GraphError
from commlib.graph.layout import copy_of, elements, is_packed
from commlib.graph.leaves import Tensors, with_grads, without_grads
from commlib.graph.outputs import Join, Outputs, leads_back, standing
from commlib.graph.overlap import overlaps, span
from commlib.graph.pieces import Pieces, making, refuse_foreign
from commlib.graph.signature import Arguments, of_tensor


class Entry:
    """A captured call without gradients.

    The graph reads the first caller's tensors where they lie. One that comes from somewhere else
    gets memory of the graph's own, once, by capturing again; from then on it is copied there.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        call: Arguments,
        make: Callable[..., tuple[Pieces, Any]],
        rooms: Sequence[torch.Tensor | None],
        *,
        copy: bool,
        own: bool,
        eager_seconds: float | None,
    ) -> None:
        """``rooms``: for each leaf of the result, where it is to lie if the graph makes it."""
        self._rooms = rooms
        self._fn, self._make, self._copy = fn, make, copy
        self._own: dict[int, torch.Tensor] = {}  # by position: memory of the graph's own
        self._targets: dict[int, torch.Tensor] = {}  # the same, to be written to
        self._strided: set[int] = set()  # those of them that have gaps, or elements twice
        if own:
            self._make_room(call, range(len(call.tensors)))
        self.replays = self.bytes_copied = 0
        self.eager_seconds = eager_seconds  # host time of the function itself
        self.launch_seconds: float | None = None  # that of one of the replays
        self._written: list[int] = []  # arguments that the function writes to
        self.lost = False  # it was to be captured again, and could not
        self.pieces: Pieces
        self._capture(call, again=False)

    def _capture(self, call: Arguments, *, again: bool) -> None:
        given = [self._own.get(i, tensor) for i, tensor in enumerate(call.tensors)]
        inputs = with_grads(self._inputs(given), call.tensors)
        args, kwargs = call.rebuilt(inputs)
        began = time.perf_counter()

        def function() -> Any:
            with self._saving():
                result = self._fn(*args, **kwargs)
            self._note(given)
            self._refuse_grads(call.tensors)
            self._refuse_overlaps(call.tensors)
            return self._kept(result, inputs)

        pieces, result = self._make(function, again=again, part="forward")
        without_grads(inputs, call.tensors)
        self.pieces, self._given = pieces, [tensor.detach() for tensor in given]  # kept alive
        self._pointers = [tensor.data_ptr() for tensor in given]
        self.externals = [
            tensor for ledger in pieces.ledgers for tensor in ledger.externals.values()
        ]
        self.outputs = Outputs(result, inputs, self._is_own, copy=self._copy)
        self._places = [(tensor, tensor.data_ptr()) for tensor in self.externals]
        self._behind(result, inputs, again=again)
        self.capture_seconds = time.perf_counter() - began

    def _note(self, given: Tensors) -> None:
        """Know what the capture has done so far: what follows is no work of the function."""
        now = making()
        assert isinstance(now, Pieces)
        now.own = sum(len(ledger.names) for ledger in now.ledgers)
        written = {key for ledger in now.ledgers for key in ledger.saved}
        places = [x.untyped_storage()._cdata for x in given]
        self._written = [i for i, key in enumerate(places) if key in written]
        touched = [item for ledger in now.ledgers for item in ledger.read.items()]
        changed = [item for ledger in now.ledgers for item in ledger.wrote.items()]
        self._outside = [(key, at) for key, at in touched if key not in places]  # no argument's
        self._outside_written = [(key, at) for key, at in changed if key not in places]

    def _kept(self, result: Any, inputs: Tensors) -> Any:
        """Bring what is returned to where no other graph's replay writes."""
        now = making()
        assert isinstance(now, Pieces)
        leaves, spec = tree_flatten(result)
        kept: dict[int, Any] = {}  # what is returned twice is one tensor
        for i, leaf in enumerate(leaves):
            if id(leaf) not in kept:
                kept[id(leaf)] = found = standing(leaf, inputs, now.has_made)
                room = self._rooms[i] if i < len(self._rooms) and not self._copy else None
                if room is not None:  # copies are cloned behind each replay
                    kept[id(leaf)] = room.copy_(found.detach())
        return tree_unflatten([kept[id(leaf)] for leaf in leaves], spec)

    def _is_own(self, tensor: torch.Tensor) -> bool:
        if any(tensor is room for room in self._rooms):
            return True
        return self.pieces.has_made(tensor)

    def _inputs(self, given: Tensors) -> Tensors:
        """Return the tensors that the function is captured with."""
        return given

    def _saving(self) -> AbstractContextManager[object]:
        """Return the context that says what autograd saves while the function runs."""
        return nullcontext()

    def _behind(self, result: Any, inputs: Tensors, *, again: bool) -> None:
        """Capture what belongs to the function beside itself."""
        if any(map(leads_back, tree_leaves(result))):
            raise GraphError(
                "an output requires grad, but no run before the capture has gone back; type "
                "warmup=2, or call the function under torch.no_grad()"
            )

    @property
    def parts(self) -> list["Entry"]:
        """The entry as one of a report."""
        return [] if self.lost else [self]

    @property
    def graphs(self) -> list[Pieces]:
        """All that it replays."""
        return [self.pieces]

    def drop_lost(self) -> bool:
        """Whether it has lost its graphs."""
        return self.lost

    def first(self, call: Arguments, caller: FrameType) -> Any:
        """Do what the capture itself has not done, and return the outputs."""
        with self.pieces.lock:
            self.replays += 1
            self.pieces.turn()
            self.pieces.replay_rest()
            return self._outcome(call.tensors, caller)

    def run(self, call: Arguments, caller: FrameType) -> Any:
        """Replay on the tensors of ``call`` and return the outputs; the host does not block."""
        tensors = call.tensors
        pointers = [tensor.data_ptr() for tensor in tensors]
        with self.pieces.lock:
            self.pieces.turn()
            self.bytes_copied = 0
            if pointers != self._pointers and self._place(call, pointers, caller):
                return self.first(call, caller)
            if self.outputs.lends:
                self.outputs.expire(f"the call at {place(caller)}")
            self.replays += 1
            if self.replays & (self.replays - 1):
                self.pieces.replay()
            else:  # every now and then: the clock takes its time too
                began = time.perf_counter()
                self.pieces.replay()
                self.launch_seconds = time.perf_counter() - began
            return self._outcome(tensors, caller)

    def _outcome(self, tensors: Sequence[torch.Tensor], caller: FrameType) -> Any:
        for i in self._written:
            if i in self._own:
                with torch.no_grad():
                    tensors[i].copy_(self._own[i])
        where = place(caller) if self.outputs.lends else ""
        return self.outputs.give(tensors, where, self._join(tensors))

    def _join(self, tensors: Sequence[torch.Tensor]) -> Join | None:
        """Return what ties outputs to the gradients of the caller's tensors."""
        return None

    def _place(self, call: Arguments, pointers: Sequence[int], caller: FrameType) -> bool:
        """Copy what lies elsewhere to where the graph reads it; says whether it captured again.

        What is copied may be an output of the last replay, so that one expires behind this.
        """
        self._refuse_overlaps(call.tensors)
        moved = [i for i, at in enumerate(pointers) if at != self._pointers[i]]
        fresh = [i for i in moved if i not in self._own]
        known = [i for i in moved if i in self._own]
        if known:
            with torch.no_grad():
                torch._foreach_copy_(
                    [self._targets[i] for i in known],
                    [self._elements(i, call.tensors[i]) for i in known],
                )
        self.bytes_copied = sum(call.tensors[i].nbytes for i in moved)
        if fresh:
            refuse_foreign()
            self._make_room(call, fresh)
            self.outputs.expire(f"the call at {place(caller)}")
            self.lost = True
            self.pieces.release()
            self._capture(call, again=True)
            self.lost = False
        return bool(fresh)

    def _refuse_grads(self, tensors: Tensors) -> None:
        """Refuse a function that reads ``grad`` of an argument: the next one's lies elsewhere."""
        for i, tensor in enumerate(tensors):
            grad = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
            key = None if grad is None else grad.untyped_storage()._cdata
            if key is not None and any(key == known for known, _ in self._outside):
                raise GraphError(
                    f"the function reads the grad of tensor {i} of its arguments, and no replay "
                    f"would find the next one's; give it the gradient as an argument"
                )

    def _refuse_overlaps(self, tensors: Tensors) -> None:
        """Refuse memory that is shared outside, and not in the graph, where one side is written."""
        for i in self._own if self._outside else ():
            key, (begin, end) = tensors[i].untyped_storage()._cdata, span(tensors[i])
            touched = [*self._outside_written, *(self._outside if i in self._written else ())]
            if any(k == key and low < end and begin < high for k, (low, high) in touched):
                raise GraphError(
                    f"tensor {i} of the arguments lies in the memory of a tensor that the function "
                    f"uses without being given it, and it writes to one of them; give it the other "
                    f"one too, or a copy"
                )
        if not self._written:
            return
        written = set(self._written)
        for i, j in overlaps(tensors):
            if self._own.get(i) is not self._own.get(j) and (i in written or j in written):
                raise GraphError(
                    f"tensors {i} and {j} of the arguments overlap, and the function writes one; "
                    f"give it one of them, and slice inside"
                )

    def moved(self) -> list[torch.Tensor]:
        """Return the tensors from outside that do not lie any more where the graph reads them."""
        return [tensor for tensor, at in self._places if tensor.data_ptr() != at]

    def _make_room(self, call: Arguments, positions: Iterable[int]) -> None:
        """Give the graph its own copies of some arguments; the same ones share one."""
        shared: dict[Any, torch.Tensor] = {}
        for i in positions:
            tensor = call.tensors[i]
            layout = tensor.data_ptr(), *of_tensor(tensor)
            self._own[i] = shared.setdefault(layout, copy_of(tensor))
            if not is_packed(tensor):
                self._strided.add(i)
            # What a replay puts there is no change of what a backward has saved of the last.
            self._targets[i] = self._elements(i, self._own[i].data)

    def _elements(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        return elements(tensor) if i in self._strided else tensor

    def release(self) -> None:
        """Let go of the graphs; what was returned can't be read any more."""
        self.outputs.expire("the release of the graph")
        self.pieces.release()


def place(caller: FrameType) -> str:
    """Return file and line of whoever called a captured function."""
    return f"{caller.f_code.co_filename}:{caller.f_lineno}"
