"""A ring of ranks as its caller sees it: who is in it, which streams it has, one verb a collective."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch

from commlib import _gate
from commlib._deadline import Deadline
from commlib._dtypes import Reducer, Wire, wire
from commlib._gate import Call, check_out, check_tensor
from commlib._streams import Fences, issue_lock
from commlib._work import Work
from commlib.errors import (
    ArgumentError,
    CommTimeout,
    DtypeError,
    EngineError,
    PeerError,
    ShapeError,
)

Tensor = torch.Tensor


class CommContext(ABC):
    """One ring: rank, size, ranks, device and streams, and the collectives over it.

    Verbs take the output first, then the input, and positions in the ring as peers and roots.
    With ``use_calc_stream=True`` a verb runs on the caller's current stream. With False it runs on
    the ring's comm stream, which first waits for the current stream; with ``sync_op=True`` the
    current stream then waits for it, with ``sync_op=False`` a ``Work`` is returned. The host never
    blocks on a GPU; on a CPU a verb blocks for at most ``timeout`` seconds unless ``sync_op=False``.
    ``fenced=False`` leaves both waits to the program (the legacy comm-stream form).
    Strided tensors are staged, so that nothing outside a view is read or written.
    """

    engine: ClassVar[str]
    reducer: ClassVar[Reducer]
    # Whether the engine takes x inside out (all_gather) and out inside x (reduce_scatter).
    parts_in_place: ClassVar[bool] = False

    def __init__(
        self, ring_id: int, rank: int, ranks: tuple[int, ...], device: torch.device, timeout: float
    ) -> None:
        self.ring_id, self.rank, self.size, self.ranks = ring_id, rank, len(ranks), ranks
        self.device, self.timeout = device, timeout
        self.fences = Fences(device) if device.type == "cuda" else None
        self.lock = issue_lock(device)
        self.calls = 0
        self.last_verb: str | None = None
        self.fault: str | None = None
        self.open_group: _gate.Group | None = None
        self.communicator_bytes = 0
        self._errors: list[str] = []
        self._unfenced: deque[tuple[torch.cuda.Event, list[Call]]] = deque()
        self._token = torch.zeros(1, dtype=torch.int32, device=device)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} ring {self.ring_id}: rank {self.rank} of {self.size} "
            f"{list(self.ranks)} on {self.device}, engine {self.engine}, {self.state}>"
        )

    # -- who and where ---------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """``ready``, or why the ring can't be used."""
        return "ready" if self.fault is None else self.fault

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The ring's own high-priority comm stream; None on a CPU."""
        return None if self.fences is None else self.fences.comm

    @property
    def has_communicator(self) -> bool:
        """Whether the engine holds a communicator; a ring of one rank never has one."""
        return self.size > 1 and self.fault is None

    def stream_for(self, use_calc_stream: bool) -> torch.cuda.Stream | None:
        """Return the stream a verb runs on: the caller's current one, or the ring's own."""
        if self.fences is None:
            return None
        return torch.cuda.current_stream(self.device) if use_calc_stream else self.fences.comm

    def where(self, verb: str) -> str:
        """Begin an error text: which verb on which ring and rank."""
        return f"{verb} on ring {self.ring_id} (rank {self.rank} of {self.size}, {self.engine})"

    # -- failure ---------------------------------------------------------------------------------

    def errors(self) -> list[str]:
        """Return what went wrong on this ring so far, oldest first; empty if nothing did."""
        return list(self._errors)

    def failed(self, verb: str, error: Exception) -> EngineError | CommTimeout:
        """Mark the ring as failed by ``error`` of the library below and return what to raise."""
        text = f"{self.where(verb)}: {type(error).__name__}: {error}"
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        self._errors.append(text)
        self.fault = self.fault or f"failed in {verb}; close it and create it again"
        if late:
            return CommTimeout(f"{text}. The deadline was {self.timeout:g} s; ranks {self.ranks}")
        return EngineError(text)

    def abort(self) -> None:
        """Give the communicator up at once, with whatever is under way; the ring is closed then."""
        with self.lock:
            self.fault = "aborted; create it again"
            self._unfenced.clear()
            self._abort()

    def close(self, deadline: Deadline) -> None:
        """Finish what is under way and free the communicator, at most until ``deadline``."""
        if self.fault is not None:
            self.abort()
            return
        self.fault = "closed; create it again"
        if self.fences is not None:
            event = torch.cuda.Event()
            self.fences.comm_waits(torch.cuda.current_stream(self.device))
            event.record(self.fences.comm)
            if not deadline.poll(event.query):
                self._errors.append(f"{self.where('close')}: calls were still running; aborted")
                self.abort()
                return
        self._unfenced.clear()
        self._close(deadline)

    # -- raw legacy form -------------------------------------------------------------------------

    def keep_unfenced(self, event: torch.cuda.Event, calls: list[Call]) -> None:
        """Hold the tensors of an unfenced call until it has finished or the program has synced."""
        if not torch.cuda.is_current_stream_capturing():
            while self._unfenced and self._unfenced[0][0].query():
                self._unfenced.popleft()
        self._unfenced.append((event, calls))

    def release_unfenced(self) -> None:
        """Let go of the tensors of unfenced calls; for a program that has just synced them."""
        self._unfenced.clear()

    # -- verbs -----------------------------------------------------------------------------------

    def all_reduce(
        self,
        out: Tensor,
        x: Tensor,
        *,
        op: str = "sum",
        factor: float | None = None,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` on every rank with the reduction of ``x`` over all ranks (any shape)."""
        self._check_pair("all_reduce", out, x)
        if out.numel() != x.numel():
            raise self._misfit("all_reduce", out, x.numel(), "as many elements as x")
        args = (self._wire("all_reduce", x, op, factor),)
        call = Call("all_reduce", self._pick(self._all_reduce, x), args, out, x, 0)
        return _gate.run(self, call, use_calc_stream, sync_op, fenced, out)

    def all_gather(
        self,
        out: Tensor,
        x: Tensor,
        *,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` on every rank with the ``x`` of rank 0, 1, … one after the other."""
        self._check_pair("all_gather", out, x)
        if out.numel() != x.numel() * self.size:
            raise self._misfit("all_gather", out, x.numel() * self.size, "size * x.numel()")
        place = self.rank * x.numel() if self.parts_in_place else None
        call = Call("all_gather", self._pick(self._all_gather, x), (), out, x, place)
        return _gate.run(self, call, use_calc_stream, sync_op, fenced, out)

    def reduce_scatter(
        self,
        out: Tensor,
        x: Tensor,
        *,
        op: str = "sum",
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` of rank r with the r-th part of the reduction of ``x`` over all ranks."""
        self._check_pair("reduce_scatter", out, x)
        if out.numel() * self.size != x.numel():
            raise self._misfit("reduce_scatter", out, x.numel() / self.size, "x.numel() / size")
        args = (self._wire("reduce_scatter", x, op),)
        place = -self.rank * out.numel() if self.parts_in_place else None
        call = Call("reduce_scatter", self._pick(self._reduce_scatter, x), args, out, x, place)
        return _gate.run(self, call, use_calc_stream, sync_op, fenced, out)

    def broadcast(
        self,
        out: Tensor,
        x: Tensor | None,
        *,
        root: int,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` on every rank with ``x`` of ``root``; elsewhere ``x`` is not read."""
        self._check_position("broadcast", "root", root)
        if self.rank != root:
            x = None
            check_out(self, "broadcast", out)
        else:
            self._check_pair("broadcast", out, x)
            if out.numel() != x.numel():  # type: ignore[union-attr]  # checked above
                raise self._misfit("broadcast", out, x.numel(), "as many elements as x")  # type: ignore[union-attr]
        call = Call("broadcast", self._pick(self._broadcast, out), (root,), out, x, 0)
        return _gate.run(self, call, use_calc_stream, sync_op, fenced, out)

    def reduce(
        self,
        out: Tensor | None,
        x: Tensor,
        *,
        root: int,
        op: str = "sum",
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` of ``root`` with the reduction of ``x``; ``out`` elsewhere is not touched."""
        self._check_position("reduce", "root", root)
        target = self._at_root("reduce", root, out, x)
        if target is not None and target.numel() != x.numel():
            raise self._misfit("reduce", target, x.numel(), "as many elements as x")
        args = (root, self._wire("reduce", x, op))
        call = Call("reduce", self._pick(self._reduce, x), args, target, x, 0)
        return _gate.run(self, call, use_calc_stream, sync_op, fenced, out)

    def gather(
        self,
        out: Tensor | None,
        x: Tensor,
        *,
        root: int,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` of ``root`` with every rank's ``x`` in turn; elsewhere it is not touched."""
        self._check_position("gather", "root", root)
        target = self._at_root("gather", root, out, x)
        if target is not None and target.numel() != x.numel() * self.size:
            raise self._misfit("gather", target, x.numel() * self.size, "size * x.numel()")
        call = Call("gather", self._pick(self._gather, x), (root,), target, x, None)
        return _gate.run(self, call, use_calc_stream, sync_op, fenced, out)

    def scatter(
        self,
        out: Tensor,
        x: Tensor | None,
        *,
        root: int,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` of rank r with the r-th part of ``x`` of ``root``; elsewhere x is not read."""
        self._check_position("scatter", "root", root)
        if self.rank != root:
            x = None
            check_out(self, "scatter", out)
        else:
            self._check_pair("scatter", out, x)
            if out.numel() * self.size != x.numel():  # type: ignore[union-attr]  # checked above
                raise self._misfit("scatter", out, x.numel() / self.size, "x.numel() / size")  # type: ignore[union-attr]
        call = Call("scatter", self._pick(self._scatter, out), (root,), out, x, None)
        return _gate.run(self, call, use_calc_stream, sync_op, fenced, out)

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        *,
        out_splits: Iterable[int] | None = None,
        in_splits: Iterable[int] | None = None,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Send the j-th part of ``x`` to rank j and fill ``out`` with what comes, in rank order.

        Parts are rows along dim 0: equal ones, or ``in_splits`` / ``out_splits`` rows a rank.
        """
        self._check_pair("all_to_all", out, x)
        sends = self._counts("all_to_all", "in_splits", x, in_splits)
        takes = self._counts("all_to_all", "out_splits", out, out_splits)
        if sends[self.rank] != takes[self.rank]:
            raise ShapeError(
                f"{self.where('all_to_all')}: this rank sends itself {sends[self.rank]} elements "
                f"but expects {takes[self.rank]}; make in_splits[{self.rank}] and "
                f"out_splits[{self.rank}] name the same rows"
            )
        # Every rank takes part, however few rows are its own: parts may be empty on one rank only.
        launch = self._alone if self.size == 1 else self._all_to_all
        call = Call("all_to_all", launch, (takes, sends), out, x, None)
        return _gate.run(self, call, use_calc_stream, sync_op, fenced, out)

    def send(
        self,
        x: Tensor,
        *,
        peer: int,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Send ``x`` to rank ``peer``, which must call ``recv`` with as many bytes."""
        self._check_peer("send", peer)
        check_tensor(self, "send", "x", x)
        call = Call("send", self._pick(self._send, x), (peer,), None, x, None)
        return _gate.run(self, call, use_calc_stream, sync_op, fenced, None)

    def recv(
        self,
        out: Tensor,
        *,
        peer: int,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` with what rank ``peer`` sends."""
        self._check_peer("recv", peer)
        check_out(self, "recv", out)
        call = Call("recv", self._pick(self._recv, out), (peer,), out, None, None)
        return _gate.run(self, call, use_calc_stream, sync_op, fenced, out)

    def barrier(
        self, *, use_calc_stream: bool = True, sync_op: bool = True, fenced: bool = True
    ) -> Any:
        """Hold this rank's stream (GPU) or host (CPU) until every rank has come here."""
        launch = self._alone if self.size == 1 else self._barrier
        call = Call("barrier", launch, (), None, None, None)
        return _gate.run(self, call, use_calc_stream, sync_op, fenced, None)

    def group(
        self, *, use_calc_stream: bool = True, sync_op: bool = True
    ) -> AbstractContextManager[Work]:
        """Collect the calls of a ``with`` block and launch them as one operation at its end.

        Sends and receives in one group can't wait for each other in a circle. Results are valid
        after the block (with ``sync_op=False``: after ``wait()`` of the yielded ``Work``). An
        exception inside the block launches nothing.
        """
        return _gate.group(self, use_calc_stream, sync_op)

    # -- checks that depend on the ring ----------------------------------------------------------

    def _check_pair(self, verb: str, out: Tensor, x: Tensor | None) -> None:
        check_out(self, verb, out)
        check_tensor(self, verb, "x", x)  # type: ignore[arg-type]  # None is refused there
        if out.dtype is not x.dtype:  # type: ignore[union-attr]
            raise self._mixed(verb, out, x)  # type: ignore[arg-type]

    def _mixed(self, verb: str, out: Tensor, x: Tensor) -> ArgumentError:
        return DtypeError(
            f"{self.where(verb)}: out is {out.dtype} and x is {x.dtype}; expected one dtype; "
            f"type x.to({out.dtype})"
        )

    def _at_root(self, verb: str, root: int, out: Tensor | None, x: Tensor) -> Tensor | None:
        if self.rank != root:
            check_tensor(self, verb, "x", x)
            return None
        self._check_pair(verb, out, x)  # type: ignore[arg-type]  # None is refused there
        return out

    def _misfit(self, verb: str, out: Tensor, expected: float, rule: str) -> ShapeError:
        return ShapeError(
            f"{self.where(verb)}: out of shape {tuple(out.shape)} has {out.numel()} elements; "
            f"expected {expected:g} ({rule})"
        )

    def _check_position(self, verb: str, role: str, position: int) -> None:
        if isinstance(position, bool) or not isinstance(position, int):
            raise PeerError(f"{self.where(verb)}: {role}={position!r} is no int")
        if not 0 <= position < self.size:
            raise PeerError(
                f"{self.where(verb)}: {role}={position} is outside the ring; expected a position "
                f"from 0 to {self.size - 1} (the ring's ranks are {list(self.ranks)})"
            )

    def _check_peer(self, verb: str, peer: int) -> None:
        self._check_position(verb, "peer", peer)
        if peer == self.rank:
            raise PeerError(
                f"{self.where(verb)}: peer={peer} is this rank itself; expected another position; "
                f"type out.copy_(x) for a local copy"
            )

    def _counts(
        self, verb: str, role: str, tensor: Tensor, splits: Iterable[int] | None
    ) -> list[int]:
        """Elements a peer, from rows a peer along dim 0."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if splits is None:
            if rows % self.size:
                raise ShapeError(
                    f"{self.where(verb)}: dim 0 of shape {tuple(tensor.shape)} does not divide by "
                    f"the ring's size {self.size}; pad it or give {role}="
                )
            return [tensor.numel() // self.size] * self.size
        counts = [int(count) for count in splits]
        if len(counts) != self.size or min(counts) < 0 or sum(counts) != rows:
            raise ShapeError(
                f"{self.where(verb)}: {role}={counts}; expected {self.size} counts >= 0 that add "
                f"up to the {rows} rows of shape {tuple(tensor.shape)}, they add up to {sum(counts)}"
            )
        row = tensor.numel() // rows if rows else 0
        return [count * row for count in counts]

    def _wire(self, verb: str, x: Tensor, op: str, factor: float | None = None) -> Wire:
        try:
            return wire(x.dtype, op, self.reducer, factor)
        except ArgumentError as error:
            raise type(error)(f"{self.where(verb)}: {error}") from None

    def _pick(self, launch: Any, tensor: Tensor) -> Any:
        """The engine's launch, or a local one where no bytes have to move between ranks."""
        if self.size == 1:
            return self._alone
        return launch if tensor.numel() else self._nothing

    def _alone(self, out: Tensor | None, x: Tensor | None, *args: Any) -> None:
        """A ring of one rank: every collective is the identity."""
        if out is not None and x is not None:
            if out.data_ptr() != x.data_ptr():
                out.view(-1).copy_(x.view(-1))
            if args and isinstance(args[-1], Wire) and args[-1].factor != 1.0:
                out.mul_(args[-1].factor)

    def _nothing(self, out: Tensor | None, x: Tensor | None, *args: Any) -> None:
        """Empty tensors: there is nothing to move, on any rank."""

    # -- what an engine implements: dense tensors, on the current stream; returns None where the
    #    stream orders the result, else an object with wait() and is_completed() -----------------

    @abstractmethod
    def _all_reduce(self, out: Tensor, x: Tensor, reduction: Wire) -> Any: ...

    @abstractmethod
    def _all_gather(self, out: Tensor, x: Tensor) -> Any: ...

    @abstractmethod
    def _reduce_scatter(self, out: Tensor, x: Tensor, reduction: Wire) -> Any: ...

    @abstractmethod
    def _broadcast(self, out: Tensor, x: Tensor | None, root: int) -> Any: ...

    @abstractmethod
    def _reduce(self, out: Tensor | None, x: Tensor, root: int, reduction: Wire) -> Any: ...

    @abstractmethod
    def _gather(self, out: Tensor | None, x: Tensor, root: int) -> Any: ...

    @abstractmethod
    def _scatter(self, out: Tensor, x: Tensor | None, root: int) -> Any: ...

    @abstractmethod
    def _all_to_all(self, out: Tensor, x: Tensor, takes: list[int], sends: list[int]) -> Any: ...

    @abstractmethod
    def _send(self, out: None, x: Tensor, peer: int) -> Any: ...

    @abstractmethod
    def _recv(self, out: Tensor, x: None, peer: int) -> Any: ...

    @abstractmethod
    def _barrier(self, out: None, x: None) -> Any: ...

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Bracket several launches so that the engine starts them as one."""
        yield

    @abstractmethod
    def _close(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def _abort(self) -> None: ...
