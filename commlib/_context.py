"""A ring of ranks as its caller sees it: its members, its streams, one verb a collective."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch

from commlib import _gate
from commlib._checks import (
    check_out,
    check_pair,
    check_peer,
    check_position,
    check_tensor,
    counts,
    misfit,
)
from commlib._deadline import Deadline
from commlib._dtypes import Reducer, Wire, wire
from commlib._gate import Call
from commlib._rollcall import Meeting
from commlib._streams import Fences, issue_lock
from commlib._work import Work
from commlib.errors import ArgumentError, CommTimeout, EngineError, ShapeError

Tensor = torch.Tensor


class CommContext(ABC):
    """One ring: rank, size, ranks, device and streams, and the collectives over it.

    Verbs take the output first, then the input, and positions in the ring as peers and roots.
    With ``use_calc_stream=True`` a verb runs on the caller's current stream. With False it runs on
    the ring's comm stream, which first waits for the current stream; with ``sync_op=True`` the
    current stream then waits for it, with ``sync_op=False`` a ``Work`` is returned. The host never
    blocks on a GPU; on a CPU a verb blocks, at most ``timeout`` seconds, unless ``sync_op=False``.
    ``fenced=False`` leaves both waits to the program (the legacy comm-stream form).
    Strided tensors are staged, so that nothing outside a view is read or written.
    """

    engine: ClassVar[str]
    reducer: ClassVar[Reducer]
    # Whether the engine takes x inside out (all_gather) and out inside x (reduce_scatter).
    parts_in_place: ClassVar[bool] = False

    def __init__(
        self,
        ring_id: int,
        rank: int,
        ranks: tuple[int, ...],
        device: torch.device,
        deadline: Deadline,
        meeting: Meeting | None,
    ) -> None:
        """Set the engine up with the other members of ``meeting``, at most until ``deadline``.

        ``meeting`` is None for a ring of one rank, which needs no communicator. The length of the
        deadline is also that of every later wait on a CPU.
        """
        self.ring_id, self.rank, self.size, self.ranks = ring_id, rank, len(ranks), ranks
        self.device, self.timeout = device, deadline.seconds
        self.fences = Fences(device) if device.type == "cuda" else None
        self.lock = issue_lock(device)
        self.calls = 0
        self.last_verb: str | None = None
        self.fault: str | None = None
        self.open_group: _gate.Group | None = None
        self.communicator_bytes = 0
        self._errors: list[str] = []
        self._reductions: dict[tuple[torch.dtype, str, float | None], Any] = {}
        self._unfenced: deque[tuple[torch.cuda.Event, list[Call]]] = deque()
        self._token = torch.zeros(1, dtype=torch.int32, device=device)
        if meeting is not None:
            self._connect(meeting, deadline)

    @staticmethod
    def credentials() -> bytes:
        """What the first member hands to the others when they meet."""
        return b""

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
        while self._unfenced and self._unfenced[0][0].query():
            self._unfenced.popleft()
        self._unfenced.append((event, calls))

    def release_unfenced(self) -> None:
        """Let go of the tensors of unfenced calls; for a program that has just synced them."""
        with self.lock:
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
        dense = check_pair(self, "all_reduce", out, x)
        count = x.numel()
        if out is not x and out.numel() != count:
            raise misfit(self, "all_reduce", out, count, "as many elements as x")
        known = self._reductions.get((x.dtype, op, factor))
        args = (known or self._reduction("all_reduce", x, op, factor),)
        launch = self._pick(self._all_reduce, count)
        return _gate.run(
            self,
            "all_reduce",
            launch,
            args,
            out,
            x,
            0,
            dense,
            out,
            use_calc_stream,
            sync_op,
            fenced,
        )

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
        dense = check_pair(self, "all_gather", out, x)
        count = x.numel()
        if out.numel() != count * self.size:
            raise misfit(self, "all_gather", out, count * self.size, "size * x.numel()")
        place = self.rank * count if self.parts_in_place else None
        launch = self._pick(self._all_gather, count)
        return _gate.run(
            self,
            "all_gather",
            launch,
            (),
            out,
            x,
            place,
            dense,
            out,
            use_calc_stream,
            sync_op,
            fenced,
        )

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
        dense = check_pair(self, "reduce_scatter", out, x)
        count = out.numel()
        if count * self.size != x.numel():
            raise misfit(self, "reduce_scatter", out, x.numel() / self.size, "x.numel() / size")
        args = (self._reduction("reduce_scatter", x, op),)
        place = -self.rank * count if self.parts_in_place else None
        launch = self._pick(self._reduce_scatter, count)
        return _gate.run(
            self,
            "reduce_scatter",
            launch,
            args,
            out,
            x,
            place,
            dense,
            out,
            use_calc_stream,
            sync_op,
            fenced,
        )

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
        source = self._from_root("broadcast", root, out, x, 1)
        launch = self._pick(self._broadcast, out.numel())
        return _gate.run(
            self,
            "broadcast",
            launch,
            (root,),
            out,
            source,
            0,
            False,
            out,
            use_calc_stream,
            sync_op,
            fenced,
        )

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
        """Fill ``out`` of ``root`` with the reduction of ``x``; elsewhere it is not touched."""
        target = self._at_root("reduce", root, out, x)
        if target is not None and target.numel() != x.numel():
            raise misfit(self, "reduce", target, x.numel(), "as many elements as x")
        args = (root, self._reduction("reduce", x, op))
        launch = self._pick(self._reduce, x.numel())
        return _gate.run(
            self, "reduce", launch, args, target, x, 0, False, out, use_calc_stream, sync_op, fenced
        )

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
        target = self._at_root("gather", root, out, x)
        if target is not None and target.numel() != x.numel() * self.size:
            raise misfit(self, "gather", target, x.numel() * self.size, "size * x.numel()")
        launch = self._pick(self._gather, x.numel())
        return _gate.run(
            self,
            "gather",
            launch,
            (root,),
            target,
            x,
            None,
            False,
            out,
            use_calc_stream,
            sync_op,
            fenced,
        )

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
        """Fill ``out`` of rank r with part r of ``x`` of ``root``; elsewhere x is not read."""
        source = self._from_root("scatter", root, out, x, self.size)
        launch = self._pick(self._scatter, out.numel())
        return _gate.run(
            self,
            "scatter",
            launch,
            (root,),
            out,
            source,
            None,
            False,
            out,
            use_calc_stream,
            sync_op,
            fenced,
        )

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
        dense = check_pair(self, "all_to_all", out, x)
        sends = counts(self, "all_to_all", "in_splits", x, in_splits)
        takes = counts(self, "all_to_all", "out_splits", out, out_splits)
        if sends[self.rank] != takes[self.rank]:
            raise ShapeError(
                f"{self.where('all_to_all')}: this rank sends itself {sends[self.rank]} elements "
                f"but expects {takes[self.rank]}; make in_splits[{self.rank}] and "
                f"out_splits[{self.rank}] name the same rows"
            )
        # Every rank takes part, however few rows are its own: others may have some to exchange.
        launch = self._pick(self._all_to_all, 1)
        return _gate.run(
            self,
            "all_to_all",
            launch,
            (takes, sends),
            out,
            x,
            None,
            dense,
            out,
            use_calc_stream,
            sync_op,
            fenced,
        )

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
        check_peer(self, "send", peer)
        check_tensor(self, "send", "x", x)
        launch = self._pick(self._send, x.numel())
        return _gate.run(
            self,
            "send",
            launch,
            (peer,),
            None,
            x,
            None,
            False,
            None,
            use_calc_stream,
            sync_op,
            fenced,
        )

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
        check_peer(self, "recv", peer)
        check_out(self, "recv", out)
        launch = self._pick(self._recv, out.numel())
        return _gate.run(
            self,
            "recv",
            launch,
            (peer,),
            out,
            None,
            None,
            False,
            out,
            use_calc_stream,
            sync_op,
            fenced,
        )

    def barrier(
        self, *, use_calc_stream: bool = True, sync_op: bool = True, fenced: bool = True
    ) -> Any:
        """Hold this rank's stream (GPU) or host (CPU) until every rank has come here."""
        launch = self._pick(self._barrier, 1)
        return _gate.run(
            self,
            "barrier",
            launch,
            (),
            None,
            None,
            None,
            False,
            None,
            use_calc_stream,
            sync_op,
            fenced,
        )

    def group(
        self, *, use_calc_stream: bool = True, sync_op: bool = True
    ) -> AbstractContextManager[Work]:
        """Collect the calls of a ``with`` block and launch them as one operation at its end.

        Sends and receives in one group can't wait for each other in a circle. Results are valid
        after the block (with ``sync_op=False``: after ``wait()`` of the yielded ``Work``). An
        exception inside the block launches nothing.
        """
        return _gate.group(self, use_calc_stream, sync_op)

    # -- the way into the engine -----------------------------------------------------------------

    def _reduction(self, verb: str, x: Tensor, op: str, factor: float | None = None) -> Any:
        """The reduction in the engine's own terms, resolved once for each dtype and op."""
        key = (x.dtype, op, factor)
        known = self._reductions.get(key)
        if known is None:
            try:
                reduction = wire(x.dtype, op, self.reducer, factor)
            except ArgumentError as error:
                raise type(error)(f"{self.where(verb)}: {error}") from None
            known = reduction if self.size == 1 else self._resolve(x.dtype, reduction)
            self._reductions[key] = known
        return known

    def _resolve(self, dtype: torch.dtype, reduction: Wire) -> Any:
        """The engine's form of ``reduction`` over ``dtype``; what its launches are given."""
        return reduction

    def _pick(self, launch: Any, count: int) -> Any:
        """The engine's launch, or a local one where no bytes have to move between ranks."""
        if count and self.size > 1:
            return launch
        return self._alone if self.size == 1 else self._nothing

    def _at_root(self, verb: str, root: int, out: Tensor | None, x: Tensor) -> Tensor | None:
        """The output where it counts; ranks other than ``root`` do not touch theirs."""
        check_position(self, verb, "root", root)
        if self.rank != root:
            check_tensor(self, verb, "x", x)
            return None
        check_pair(self, verb, out, x)  # type: ignore[arg-type]  # None is refused there
        return out

    def _from_root(
        self, verb: str, root: int, out: Tensor, x: Tensor | None, parts: int
    ) -> Tensor | None:
        """The input where it counts, ``parts`` times the size of ``out``.

        Ranks other than ``root`` do not read theirs; if they give one, it must fit all the same.
        """
        check_position(self, verb, "root", root)
        if x is None and self.rank != root:
            check_out(self, verb, out)
            return None
        check_pair(self, verb, out, x)  # type: ignore[arg-type]  # None is refused there
        count = x.numel()  # type: ignore[union-attr]
        if out.numel() * parts != count:
            raise misfit(self, verb, out, count / parts, f"x.numel() / {parts}")
        return x if self.rank == root else None

    def _alone(self, out: Tensor | None, x: Tensor | None, *args: Any) -> None:
        """A ring of one rank: every collective is the identity."""
        if out is None or x is None:
            return
        if out.data_ptr() != x.data_ptr():
            out.view(-1).copy_(x.view(-1))
        if args and isinstance(args[-1], Wire) and args[-1].factor != 1.0:
            out.mul_(args[-1].factor)

    @staticmethod
    def _nothing(out: Tensor | None, x: Tensor | None, *args: Any) -> None:
        """Empty tensors: there is nothing to move, on any rank."""
        return

    # -- what an engine implements: dense tensors, on the current stream; returns None where the
    #    stream orders the result, else an object with wait() and is_completed() -----------------

    @abstractmethod
    def _all_reduce(self, out: Tensor, x: Tensor, reduction: Any) -> Any: ...

    @abstractmethod
    def _all_gather(self, out: Tensor, x: Tensor) -> Any: ...

    @abstractmethod
    def _reduce_scatter(self, out: Tensor, x: Tensor, reduction: Any) -> Any: ...

    @abstractmethod
    def _broadcast(self, out: Tensor, x: Tensor | None, root: int) -> Any: ...

    @abstractmethod
    def _reduce(self, out: Tensor | None, x: Tensor, root: int, reduction: Any) -> Any: ...

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

    @abstractmethod
    def _connect(self, meeting: Meeting, deadline: Deadline) -> None: ...

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Bracket several launches so that the engine starts them as one."""
        yield

    @abstractmethod
    def _close(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def _abort(self) -> None: ...
