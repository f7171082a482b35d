"""The GPU engine: NCCL through CuPy, over the library that `_libnccl` finds."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch

from commlib._context import CommContext
from commlib._deadline import Deadline, bounded
from commlib._dtypes import Reducer, Wire
from commlib._libnccl import library, raw
from commlib._log import log
from commlib._ring import ABORT_S
from commlib._rollcall import Meeting
from commlib._routes import Routes
from commlib._streams import current_raw
from commlib.channel import residency
from commlib.channel.rows import RowChannel, open_channel
from commlib.custom_allreduce import choose
from commlib.custom_allreduce.norm import Norm, PushedNorm
from commlib.custom_allreduce.push import PushChannel, Pushed, open_push
from commlib.custom_allreduce.split import Split
from commlib.errors import CommTimeout, EngineError

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


_aborted: list[PushChannel | RowChannel] = []  # whose kernels may still run


class _Reduction(NamedTuple):
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

    _comm: Any = None
    _rows: RowChannel | str | None = None  # why there is none, or None while that is open
    _push: PushChannel | str = "a ring of one rank"  # or why there is none
    _gathered: Pushed | None = None
    _parted: Pushed | None = None
    _normed: PushedNorm | None = None
    _index: int

    @staticmethod
    def credentials() -> bytes:
        """Return a fresh ncclUniqueId (128 bytes)."""
        return bytes(library().get_unique_id())

    def _connect(self, meeting: Meeting, deadline: Deadline) -> None:
        device = self.device
        self._index = device.index
        torch.cuda.synchronize(device)
        free = torch.cuda.mem_get_info(device)[0]
        self._initialise(meeting.payload, deadline)
        self.communicator_bytes = max(0, free - torch.cuda.mem_get_info(device)[0])
        self.fills = residency.claim(self)
        self._push = open_push(self)
        if isinstance(self._push, PushChannel):
            self._gathered = self._push.movement("all_gather")
            self._parted = self._push.movement("all_to_all")
            self._normed = PushedNorm(self._push, self)
        else:
            log.once("ring %d has no push kernels: %s", self.ring_id, self._push)

    def _initialise(self, credentials: bytes, deadline: Deadline) -> None:
        """Make the communicator, and pass one token around: no later call sets anything up."""
        nccl, what = library(), self.where("initialising NCCL")

        def initialise() -> Any:
            torch.cuda.set_device(self.device)
            return nccl.NcclCommunicator(self.size, credentials, self.rank)

        self._comm = bounded(initialise, deadline, what)
        self._pass_token(self._comm)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        if not deadline.poll(event.query):
            self._abort()
            raise CommTimeout(f"{what}: the first collective took over {deadline.seconds:g} s")

    def _reconnect(self) -> None:
        """Make another communicator: calls of this one wait for peers that never made them.

        NCCL's kernels have no deadline, and what waits for push kernels may be launched behind a
        fault on one rank and not on another.
        """
        self._release_graphs()
        comm, self._comm = self._comm, None
        bounded(comm.abort, Deadline(ABORT_S), self.where("aborting NCCL"))
        bounded(self._drain, Deadline(self.timeout / 2), self.where("reset"))
        own = self.credentials() if self.rank == 0 else b""
        self._initialise(self.exchange_bytes(own)[0], Deadline(self.timeout))

    @property
    def _free_comm(self) -> Any:
        """The communicator, for a call that may be launched: NCCL knows of no fault of a kernel."""
        for channel in self._channels():
            channel.check()
        return self._comm

    def _resolve(self, dtype: torch.dtype, reduction: Wire) -> Any:
        if reduction.op == "premul_sum":
            return reduction
        parts = dtype.itemsize // reduction.dtype.itemsize
        found = _Reduction(reduction.op, parts, _TYPES[reduction.dtype], _OPS[reduction.op])
        if isinstance(self._push, str):
            return found
        whole = self._push.reduction("all_reduce", reduction.dtype, reduction.op)
        part = self._push.reduction("reduce_scatter", reduction.dtype, reduction.op)
        return found._replace(all_reduce=whole, reduce_scatter=part)

    @contextmanager
    def _premul(self, reduction: Wire) -> Iterator[_Reduction]:
        """ncclRedOpCreatePreMulSum, which CuPy lacks; NCCL lets go of it when the call returns."""
        nccl, handle = raw(), self._comm.comm
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
        self._free_comm.allReduce(
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
        self._free_comm.allGather(
            x.data_ptr(), out.data_ptr(), x.nbytes, _BYTES, current_raw(self._index)
        )

    def _reduce_scatter(self, out: Tensor, x: Tensor, reduction: _Reduction) -> None:
        pushed = reduction.reduce_scatter
        if pushed is not None and pushed(out, x, out.nbytes):
            return
        self._free_comm.reduceScatter(
            x.data_ptr(),
            out.data_ptr(),
            out.numel() * reduction.parts,
            reduction.kind,
            reduction.op,
            current_raw(self._index),
        )

    def _broadcast(self, out: Tensor, x: Tensor | None, root: int) -> None:
        source = out if x is None else x
        self._free_comm.broadcast(
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
        self._free_comm.reduce(
            x.data_ptr(), target, count, reduction.kind, reduction.op, root, stream
        )

    def _gather(self, out: Tensor | None, x: Tensor, root: int) -> None:
        with self.coalesced():
            if out is not None:
                for peer in range(self.size):
                    self._take(out, peer * x.nbytes, x.nbytes, peer)
            self._give(x, 0, x.nbytes, root)

    def _scatter(self, out: Tensor, x: Tensor | None, root: int) -> None:
        with self.coalesced():
            if x is not None:
                for peer in range(self.size):
                    self._give(x, peer * out.nbytes, out.nbytes, peer)
            self._take(out, 0, out.nbytes, root)

    def _all_to_all(self, out: Tensor, x: Tensor, takes: list[int], sends: list[int]) -> None:
        item, taken, sent = out.itemsize, 0, 0
        with self.coalesced():
            for peer in range(self.size):
                self._give(x, sent, sends[peer] * item, peer)
                self._take(out, taken, takes[peer] * item, peer)
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
        return super()._exchange_rows(out, x, routes)

    def _send(self, out: None, x: Tensor, peer: int) -> None:
        self._give(x, 0, x.nbytes, peer)

    def _recv(self, out: Tensor, x: None, peer: int) -> None:
        self._take(out, 0, out.nbytes, peer)

    def _give(self, x: Tensor, offset: int, nbytes: int, peer: int) -> None:
        if nbytes:
            source, stream = x.data_ptr() + offset, current_raw(self._index)
            self._free_comm.send(source, nbytes, _BYTES, peer, stream)

    def _take(self, out: Tensor, offset: int, nbytes: int, peer: int) -> None:
        if nbytes:
            target, stream = out.data_ptr() + offset, current_raw(self._index)
            self._free_comm.recv(target, nbytes, _BYTES, peer, stream)

    def _barrier(self, out: None, x: None) -> None:
        self._pass_token(self._free_comm)

    def _pass_token(self, comm: Any) -> None:
        token, kind, op = self._token.data_ptr(), _TYPES[torch.int32], _OPS["max"]
        comm.allReduce(token, token, 1, kind, op, current_raw(self._index))

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Bracket launches with ncclGroupStart and ncclGroupEnd (which nest).

        What would refuse a call inside does so before the first one: a group can't be taken back.
        """
        nccl = library()
        for channel in self._channels():
            channel.ready()
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
        if self._comm is not None:
            try:
                self._comm.check_async_error()
            except Exception as error:
                found.append(f"{self.where('asynchronous error')}: {error}")
        return found

    def _carrier(self, nbytes: int, reduction: Wire) -> str:
        if isinstance(self._push, str):
            return f"NCCL: {self._push}"
        reason = choose.refusal(reduction.dtype, reduction.op)
        if reason:
            return f"NCCL: {reason}"
        row = choose.choose("all_reduce", nbytes, self.size)
        if row is None:
            return f"NCCL: the table leaves {nbytes} bytes over {self.size} ranks to it"
        return (
            f"{row.kernel} push: the table's row for up to {row.most} bytes over {self.size} "
            f"ranks, {row.threads} threads a block and at most {row.blocks} blocks"
        )

    def _channels(self) -> list[PushChannel | RowChannel]:
        held = (self._push, self._rows)
        return [one for one in held if isinstance(one, PushChannel | RowChannel)]

    def abandon(self, capture: int) -> None:
        """Forget the first half of a split call that a capture has begun and come to nothing."""
        if isinstance(self._push, PushChannel):
            self._push.abandon(capture)

    def _close(self, deadline: Deadline) -> None:
        residency.release(self)
        comm, self._comm = self._comm, None
        channels = self._channels()
        self._push = self._rows = "closed"
        for channel in channels:
            self._in_time(channel.close, deadline, "closing a channel")
        if comm is None:
            return
        self._in_time(comm.destroy, deadline, "destroying NCCL")

    def _abort(self) -> None:
        residency.release(self)
        comm, self._comm = self._comm, None
        # Kernels that still run may use the channels' memory: it stays mapped, on the host too.
        _aborted.extend(self._channels())
        self._push = self._rows = "aborted"
        if comm is not None:
            self._in_time(comm.abort, Deadline(ABORT_S), "aborting NCCL")
