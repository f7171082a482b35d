"""The GPU engine: NCCL through CuPy, over the library that `libnccl` finds."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from commlib.core.context import CommContext
from commlib.core.dispatch import Call
from commlib.deadlines import Deadline
from commlib.engines.libnccl import library, raw
from commlib.engines.nccl_connection import Connection
from commlib.engines.reductions import Reducer, Wire
from commlib.errors import CommTimeout, EngineError
from commlib.log import log
from commlib.p2p import kernel_table, residency
from commlib.p2p.expert_rows import RowChannel, open_channel
from commlib.p2p.fused_norm import Norm, PushedNorm
from commlib.p2p.push_collectives import PushChannel, Pushed, open_push
from commlib.p2p.routes import Routes
from commlib.p2p.split_all_reduce import Split
from commlib.rendezvous.roll_call import Meeting
from commlib.streams import current_raw

Tensor = torch.Tensor

# ncclDataType_t and ncclRedOp_t (nccl.h); CuPy's own constants stop before the 8-bit floats.
_BYTES = 0
_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


# Launches by what they need of NCCL where no push kernel carries them.
_BETWEEN_TWO = ("_send", "_recv")
_EXCHANGES = ("_gather", "_scatter", "_all_to_all", "_equal_parts", "_exchange_rows")
_COLLECTIVES = (
    "_all_reduce",
    "_all_gather",
    "_reduce_scatter",
    "_broadcast",
    "_reduce",
    "_barrier",
)

_aborted: list[PushChannel | RowChannel] = []  # whose kernels may still run


@dataclass(frozen=True, eq=False)  # equal by identity: a key at every call
class _Reduction:
    """How NCCL is asked for a reduction, and what may carry it instead."""

    name: str
    parts: int  # elements of the reduction for each element of the tensor
    kind: int
    op: int
    all_reduce: Pushed | None = None
    reduce_scatter: Pushed | None = None


class NCCLCommContext(CommContext):
    """A ring of GPU ranks over one NCCL communicator that commlib owns."""

    engine: ClassVar[str] = "nccl"
    reducer: ClassVar[Reducer] = Reducer("nccl", unsigned=True, premul=True)
    parts_in_place: ClassVar[bool] = True

    _connection: Connection | None = None  # None in a ring of one rank
    _rows: RowChannel | str | None = None  # why there is none, or None while that is open
    _push: PushChannel | str = "a ring of one rank"  # or why there is none
    _gathered: Pushed | None = None
    _parted: Pushed | None = None
    _normed: PushedNorm | None = None
    _branches: dict[int, torch.cuda.Stream] | None = None  # of the group that is launched now
    _index: int

    def _connect(self, meeting: Meeting, deadline: Deadline) -> None:
        meeting.connecting(deadline)
        self._index = self.device.index
        self._branch_streams: list[torch.cuda.Stream] = []
        self._connection = Connection(self)
        self._bounded(self._drain, deadline, "connecting")  # what follows waits for the device
        self.fills = residency.claim(self)
        free = torch.cuda.mem_get_info(self.device)[0]
        self._push = open_push(self)
        self.workspace_bytes = max(0, free - torch.cuda.mem_get_info(self.device)[0])
        if isinstance(self._push, PushChannel):
            self._gathered = self._push.movement("all_gather")
            self._parted = self._push.movement("all_to_all")
            self._normed = PushedNorm(self._push, self)
        else:
            log.once("ring %d has no push kernels: %s", self.ring_id, self._push)

    def connect(self) -> None:
        """Make the NCCL communicator now, and connect all peers. Every member calls it.

        Without it the first call that needs NCCL does so, which no capture allows. Blocks the host
        at most ``timeout`` seconds per step.

        Raises:
            CommTimeout: Naming the positions of the members that are late.
            EngineError: NCCL reports a failure.
            RingError: The ring has failed or is closed.
        """
        if self.fault is not None:
            raise self.unusable("connect")
        if self._connection is not None:
            self._connection.connect(exchanges=True)

    @property
    def has_communicator(self) -> bool:
        """Whether NCCL holds a communicator; the first call that needs it makes it."""
        connection = self._connection
        return super().has_communicator and connection is not None and connection.connected

    def _reconnect(self) -> None:
        """Give up the communicators: calls of theirs wait for peers that never made them.

        NCCL's kernels have no deadline, and what waits for push kernels may be launched after a
        fault on one rank and not on another. The next call that needs NCCL connects again.
        """
        connection = self._connection
        if connection is None or not connection.connected:
            raise CommTimeout("a device is not idle")
        self._release_graphs()
        connection.renew()
        self._bounded(self._drain, Deadline(self.timeout / 2), "reset")
        connection.connect()

    def _ready(self) -> Connection:
        """Return the connection for a launch, after a check that no kernel has reported a fault."""
        for channel in self._channels():
            channel.check()
        assert self._connection is not None  # a ring of one rank launches nothing
        return self._connection

    def prepare(self, calls: Sequence[Call]) -> None:
        """Raise ``Unconnected`` for the first of the calls that has no communicator yet.

        A group can't be taken back once some of its calls are launched. What all members connect
        precedes the pairs, and these follow one order on all members: no circle of ranks waits.
        """
        connection = self._connection
        if connection is None:
            return
        names = {call.launch.__name__ for call in calls if not self._pushes(call)}
        if not names.isdisjoint(_EXCHANGES):
            connection.exchange()
        elif not names.isdisjoint(_COLLECTIVES):
            connection.collective()
        peers = {call.args[0] for call in calls if call.launch.__name__ in _BETWEEN_TWO}
        for peer in sorted(peers, key=lambda peer: sorted((self.rank, peer))):
            connection.to(peer)

    def _pushes(self, call: Call) -> bool:
        """Return True if push kernels carry a call."""
        name = call.launch.__name__
        pushed, nbytes = None, 0 if call.x is None else call.x.nbytes
        reduction = call.args[-1] if call.args else None
        if name == "_all_gather":
            pushed = self._gathered
        elif name == "_equal_parts":
            pushed, nbytes = self._parted, nbytes // self.size
        elif name == "_all_reduce" and isinstance(reduction, _Reduction):
            pushed = reduction.all_reduce
        elif name == "_reduce_scatter" and isinstance(reduction, _Reduction):
            pushed, nbytes = reduction.reduce_scatter, nbytes // self.size
        return pushed is not None and pushed.takes(nbytes)

    def _resolve(self, dtype: torch.dtype, reduction: Wire) -> Any:
        if reduction.op == "premul_sum":
            return reduction
        parts = dtype.itemsize // reduction.dtype.itemsize
        found = _Reduction(reduction.op, parts, _TYPES[reduction.dtype], _OPS[reduction.op])
        if isinstance(self._push, str):
            return found
        whole = self._push.reduction("all_reduce", reduction.dtype, reduction.op)
        part = self._push.reduction("reduce_scatter", reduction.dtype, reduction.op)
        return replace(found, all_reduce=whole, reduce_scatter=part)

    @contextmanager
    def _premul(self, reduction: Wire) -> Iterator[_Reduction]:
        """ncclRedOpCreatePreMulSum, which CuPy lacks; NCCL lets go of it when the call returns."""
        nccl, handle = raw(), self._ready().collective().comm
        scalar = torch.tensor([reduction.factor], dtype=reduction.dtype, device="cpu")
        op, host_immediate, kind = ctypes.c_int(), 1, _TYPES[reduction.dtype]
        status = nccl.ncclRedOpCreatePreMulSum(
            ctypes.byref(op), scalar.data_ptr(), kind, host_immediate, handle
        )
        if status != 0:
            raise EngineError(f"{self.where('premul_sum')}: ncclRedOpCreatePreMulSum: {status}")
        try:
            yield _Reduction(reduction.op, 1, kind, op.value)
        finally:
            nccl.ncclRedOpDestroy(op, handle)

    def _all_reduce(self, out: Tensor, x: Tensor, reduction: "_Reduction | Wire") -> None:
        if isinstance(reduction, Wire):
            with self._premul(reduction) as made:
                self._all_reduce(out, x, made)
            return
        pushed = reduction.all_reduce
        if pushed is not None and pushed(out, x, x.nbytes):
            return
        self._ready().collective().allReduce(
            x.data_ptr(),
            out.data_ptr(),
            x.numel() * reduction.parts,
            reduction.kind,
            reduction.op,
            current_raw(self._index),
        )

    def _fused(self, x: Tensor, norm: Norm) -> tuple[Any, Any] | None:
        if self._normed is None or isinstance(self._push, str):
            return None
        steps = self._normed.steps(x, norm)
        return (self._normed.launch, steps) if steps else None

    def _begin(self, out: Tensor, x: Tensor, reduction: Any) -> Split | None:
        pushed = reduction.all_reduce if isinstance(reduction, _Reduction) else None
        halves = None if pushed is None else pushed.split(x.nbytes)
        if halves is None or isinstance(self._push, str):
            return None
        return Split(self, self._push, halves, out, x)

    def _all_gather(self, out: Tensor, x: Tensor) -> None:
        if self._gathered is not None and self._gathered(out, x, x.nbytes):
            return
        self._ready().collective().allGather(
            x.data_ptr(), out.data_ptr(), x.nbytes, _BYTES, current_raw(self._index)
        )

    def _reduce_scatter(self, out: Tensor, x: Tensor, reduction: _Reduction) -> None:
        pushed = reduction.reduce_scatter
        if pushed is not None and pushed(out, x, out.nbytes):
            return
        self._ready().collective().reduceScatter(
            x.data_ptr(),
            out.data_ptr(),
            out.numel() * reduction.parts,
            reduction.kind,
            reduction.op,
            current_raw(self._index),
        )

    def _broadcast(self, out: Tensor, x: Tensor | None, root: int) -> None:
        source = out if x is None else x
        self._ready().collective().broadcast(
            source.data_ptr(),
            out.data_ptr(),
            out.nbytes,
            _BYTES,
            root,
            current_raw(self._index),
        )

    def _reduce(self, out: Tensor | None, x: Tensor, root: int, reduction: _Reduction) -> None:
        target, stream = 0 if out is None else out.data_ptr(), current_raw(self._index)
        count = x.numel() * reduction.parts
        self._ready().collective().reduce(
            x.data_ptr(), target, count, reduction.kind, reduction.op, root, stream
        )

    def _gather(self, out: Tensor | None, x: Tensor, root: int) -> None:
        comm = self._ready().exchange()
        with self.coalesced():
            if out is not None:
                for peer in range(self.size):
                    self._take(comm, out, peer * x.nbytes, x.nbytes, peer)
            self._give(comm, x, 0, x.nbytes, root)

    def _scatter(self, out: Tensor, x: Tensor | None, root: int) -> None:
        comm = self._ready().exchange()
        with self.coalesced():
            if x is not None:
                for peer in range(self.size):
                    self._give(comm, x, peer * out.nbytes, out.nbytes, peer)
            self._take(comm, out, 0, out.nbytes, root)

    def _all_to_all(self, out: Tensor, x: Tensor, takes: list[int], sends: list[int]) -> None:
        item, taken, sent = out.itemsize, 0, 0
        comm = self._ready().exchange()
        with self.coalesced():
            for peer in range(self.size):
                self._give(comm, x, sent, sends[peer] * item, peer)
                self._take(comm, out, taken, takes[peer] * item, peer)
                sent += sends[peer] * item
                taken += takes[peer] * item

    def _equal_parts(self, out: Tensor, x: Tensor, takes: list[int], sends: list[int]) -> None:
        if self._parted is None or not self._parted(out, x, takes[0] * x.itemsize):
            self._all_to_all(out, x, takes, sends)

    def _prepare_rows(self) -> None:
        """Decide, together with the other members, what carries rows: a channel, or NCCL."""
        if self._rows is None:
            self._rows = open_channel(self)
            if isinstance(self._rows, str):
                log.once("rows of ring %d go through NCCL: %s", self.ring_id, self._rows)

    def _exchange_rows(self, out: Tensor, x: Tensor, routes: Routes) -> Any:
        if isinstance(self._rows, RowChannel) and self._rows.takes(routes):
            return self._rows.exchange(out, x, routes)
        self._ready().exchange()
        return super()._exchange_rows(out, x, routes)

    def _send(self, out: None, x: Tensor, peer: int) -> None:
        comm, number = self._ready().to(peer)
        with self._branch(peer):
            self._give(comm, x, 0, x.nbytes, number)

    def _recv(self, out: Tensor, x: None, peer: int) -> None:
        comm, number = self._ready().to(peer)
        with self._branch(peer):
            self._take(comm, out, 0, out.nbytes, number)

    def _branch(self, peer: int) -> AbstractContextManager[Any]:
        """Give the calls of a group with one peer a stream, where pairs have communicators.

        Kernels of several communicators on one stream would run in turn, and a circle of sends and
        receives would wait for ever.
        """
        branches = self._branches
        if branches is None or self.size == 2 or self._ready().exchanges:
            return nullcontext()
        if peer not in branches:
            while len(self._branch_streams) <= len(branches):
                self._branch_streams.append(torch.cuda.Stream(self.device))
            branches[peer] = self._branch_streams[len(branches)]
            branches[peer].wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(branches[peer])

    @contextmanager
    def _branched(self) -> Iterator[None]:
        """Join the branches of a group when all of it is launched."""
        if self._branches is not None:  # a group in a group
            yield
            return
        branches = self._branches = {}
        try:
            yield
        finally:
            self._branches = None
            for stream in branches.values():
                torch.cuda.current_stream(self.device).wait_stream(stream)

    def _give(self, comm: Any, x: Tensor, offset: int, nbytes: int, peer: int) -> None:
        if nbytes:
            comm.send(x.data_ptr() + offset, nbytes, _BYTES, peer, current_raw(self._index))

    def _take(self, comm: Any, out: Tensor, offset: int, nbytes: int, peer: int) -> None:
        if nbytes:
            comm.recv(out.data_ptr() + offset, nbytes, _BYTES, peer, current_raw(self._index))

    def _barrier(self, out: None, x: None) -> None:
        token, kind, op = self._token.data_ptr(), _TYPES[torch.int32], _OPS["max"]
        comm = self._ready().collective()
        comm.allReduce(token, token, 1, kind, op, current_raw(self._index))

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Bracket launches with ncclGroupStart and ncclGroupEnd (which nest).

        What would refuse a call inside does so before the first one: a group can't be taken back.
        """
        nccl = library()
        for channel in self._channels():
            channel.ready()
        with self._branched():
            nccl.groupStart()
            try:
                yield
            finally:
                nccl.groupEnd()

    @contextmanager
    def bounded(self, blocks: int) -> Iterator[None]:
        """Let push kernels inside have at most so many blocks; the issue lock is held."""
        push = self._push
        if isinstance(push, str):
            yield
            return
        push.share = blocks
        try:
            yield
        finally:
            push.share = 0

    def errors(self) -> list[str]:
        """Return what went wrong on this ring so far, NCCL's asynchronous errors included."""
        found = super().errors()
        try:
            if self._connection is not None:
                self._connection.check()
        except Exception as error:
            found.append(f"{self.where('asynchronous error')}: {error}")
        return found

    def _carrier(self, nbytes: int, reduction: Wire) -> str:
        if isinstance(self._push, str):
            return self._by_nccl(self._push)
        reason = kernel_table.refusal(reduction.dtype, reduction.op)
        if reason:
            return self._by_nccl(reason)
        row = kernel_table.choose("all_reduce", nbytes, self.size)
        if row is None:
            return self._by_nccl(f"the table leaves {nbytes} bytes over {self.size} ranks to it")
        return (
            f"{row.kernel} push: the table's row for up to {row.most} bytes over {self.size} "
            f"ranks, {row.threads} threads a block and at most {row.blocks} blocks"
        )

    def _by_nccl(self, why: str) -> str:
        """Say that NCCL carries a call, and what its first call will take."""
        if self._connection is None or self._connection.connected:
            return f"NCCL: {why}"
        return (
            f"NCCL: {why}; the ring has no NCCL communicator yet: the first such call makes it, "
            f"which blocks the host and takes GPU memory (several hundred MiB), or call "
            f"ring.connect() on every member"
        )

    def _channels(self) -> list[PushChannel | RowChannel]:
        held = (self._push, self._rows)
        return [one for one in held if isinstance(one, PushChannel | RowChannel)]

    def _suspend(self) -> None:
        rows, connection = self._rows, self._connection
        captured = isinstance(rows, RowChannel) and rows.captured
        held = connection is not None and connection.held
        facts = self.exchange([int(captured), int(held)])
        if isinstance(rows, RowChannel) and not any(row[0] for row in facts):
            rows.close()
            self._rows = None  # the next exchange of rows opens one
        if connection is not None and not any(row[1] for row in facts):
            connection.suspend()

    def _resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def abandon(self, capture: int) -> None:
        """Forget the first half of a split call that a capture has begun and come to nothing."""
        if isinstance(self._push, PushChannel):
            self._push.abandon(capture)

    def _close(self, deadline: Deadline) -> None:
        residency.release(self)
        channels = self._channels()
        self._push = self._rows = "closed"
        for channel in channels:
            self._in_time(channel.close, deadline, "closing a channel")
        if self._connection is not None:
            self._connection.close(deadline)

    def _abort(self) -> None:
        residency.release(self)
        # Kernels that still run may use the channels' memory: it stays mapped, on the host too.
        _aborted.extend(self._channels())
        self._push = self._rows = "aborted"
        if self._connection is not None:
            self._connection.abort()
