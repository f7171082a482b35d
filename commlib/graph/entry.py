"""One captured key: its graphs, the tensors they read, and how a call uses them."""

import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from commlib.errors import GraphError
from commlib.graph.outputs import Join, Outputs, leads_back
from commlib.graph.overlap import overlaps
from commlib.graph.pieces import Pieces, making, refuse_foreign
from commlib.graph.signature import Arguments, of_tensor

Tensors = list[torch.Tensor]


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
        inputs = self._inputs(given)
        args, kwargs = call.rebuilt(inputs)
        began = time.perf_counter()

        def function() -> Any:
            result = self._fn(*args, **kwargs)
            self._note(given)
            self._refuse_overlaps(call.tensors)
            return self._kept(result)

        pieces, result = self._make(function, again=again, part="forward")
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
        self._written = [i for i, x in enumerate(given) if x.untyped_storage()._cdata in written]

    def _kept(self, result: Any) -> Any:
        """Bring what is returned to where no other graph's replay writes."""
        if self._copy:  # cloned behind each replay
            return result
        leaves, spec = tree_flatten(result)
        for i, room in enumerate(self._rooms):
            if room is not None:
                leaves[i] = room.copy_(leaves[i].detach())
        return tree_unflatten(leaves, spec)

    def _is_own(self, tensor: torch.Tensor) -> bool:
        if any(tensor is room for room in self._rooms):
            return True
        return self.pieces.has_made(tensor)

    def _inputs(self, given: Tensors) -> Tensors:
        """Return the tensors that the function is captured with."""
        return given

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
                    [self._own[i] for i in known], [call.tensors[i] for i in known]
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

    def _refuse_overlaps(self, tensors: Tensors) -> None:
        """Refuse a written argument that shares memory with another, and does not in the graph."""
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
            self._own[i] = shared.setdefault(layout, _copy_of(tensor))

    def release(self) -> None:
        """Let go of the graphs; what was returned can't be read any more."""
        self.outputs.expire("the release of the graph")
        self.pieces.release()


def place(caller: FrameType) -> str:
    """Return file and line of whoever called a captured function."""
    return f"{caller.f_code.co_filename}:{caller.f_lineno}"


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the same strides; what is repeated in the original is not."""
    own = tensor.detach().clone()
    return own.requires_grad_(tensor.requires_grad)
