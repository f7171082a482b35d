"""The GPU engine: NCCL through CuPy, over the library that `libnccl` finds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import copysign
from typing import Any, ClassVar

import torch

from commlib.deadlines import Deadline
from commlib.engines.base import EngineMemory, Launch
from commlib.engines.nccl.exchanges import NCCLExchanges
from commlib.engines.nccl.reductions import BYTES, OPS, TYPES, Reduction, explain, scaled
from commlib.engines.reductions import Reducer, ReductionSpec
from commlib.log import log
from commlib.p2p import residency
from commlib.p2p.channel import ExpertKernels
from commlib.p2p.experts.channel import ExpertChannel, open_experts
from commlib.p2p.experts.rows import RowChannel, open_channel
from commlib.p2p.fused_norm import Norm, PushNorm
from commlib.p2p.optional_channel import OptionalChannel
from commlib.p2p.push_channel import PushChannel
from commlib.p2p.push_collectives import PushCollective, open_push
from commlib.p2p.routes import Routes
from commlib.p2p.split_all_reduce import SplitAllReduce
from commlib.rendezvous.hosts import HostExchange
from commlib.rendezvous.identity import Health, RingIdentity
from commlib.rendezvous.roll_call import Meeting
from commlib.streams import current_raw

Tensor = torch.Tensor

_Channel = PushChannel | RowChannel | ExpertChannel
_aborted: list[_Channel] = []  # whose kernels may still run


class NCCLEngine(NCCLExchanges):
    """GPU ranks over NCCL communicators that commlib owns, and push kernels on one host."""

    name: ClassVar[str] = "nccl"
    reducer: ClassVar[Reducer] = Reducer("nccl", unsigned=True)
    parts_in_place: ClassVar[bool] = True

    def __init__(self, identity: RingIdentity, hosts: HostExchange, health: Health) -> None:
        super().__init__(identity, hosts, health)
        self._rows = OptionalChannel(hosts, open_channel, "NCCL carries the rows")
        self._experts = OptionalChannel(hosts, open_experts, "no kernels carry the experts")
        self._push: PushChannel | str = "not set up yet"  # or why there is none
        self._claim: residency.Claim  # made by open()
        self._gathered: PushCollective | None = None
        self._parted: PushCollective | None = None
        self._normed: PushNorm | None = None

    # -- life --------------------------------------------------------------------------------------

    def open(self, meeting: Meeting, deadline: Deadline) -> None:
        """Set the push kernels up; NCCL connects at the first call that needs it."""
        meeting.connecting(deadline)
        # What follows waits for the device.
        synchronize = partial(torch.cuda.synchronize, self.device)
        self.identity.bounded(synchronize, deadline, "connecting")
        self._claim = residency.claim(self.hosts)
        self._push = open_push(self.hosts, self._claim)
        if isinstance(self._push, PushChannel):
            self._gathered = PushCollective.moving(self._push, "all_gather")
            self._parted = PushCollective.moving(self._push, "all_to_all")
            self._normed = PushNorm(self._push, self.hosts)
        else:
            log.once("ring %d has no push kernels: %s", self.identity.ring_id, self._push)

    def connect(self) -> None:
        """Make the NCCL communicator now, and connect all peers; every member calls it."""
        self._connection.connect(exchanges=True)

    @property
    def connected(self) -> bool:
        """Return True if NCCL holds a communicator; the first call that needs it makes it."""
        return self._connection.connected

    @property
    def memory(self) -> EngineMemory:
        """Return the GPU memory of the communicators and of the channels."""
        channels = self.channels()
        return EngineMemory(self._connection.nbytes, sum(each.nbytes for each in channels))

    @property
    def replaceable(self) -> bool:
        """Return True if there is a communicator: NCCL's kernels have no deadline."""
        return self._connection.connected

    def disconnect(self) -> None:
        """Abort the communicators: their calls wait for peers that never made them.

        After a fault, NCCL calls queued after push kernels may be launched on some ranks only.
        """
        self._connection.renew()

    def reconnect(self) -> None:
        """Connect again."""
        self._connection.connect()

    def suspend(self) -> None:
        """Free communicators and workspaces for rows, unless a member's graphs hold them."""
        optional: tuple[OptionalChannel[Any], ...] = (self._rows, self._experts)
        held = [*(one.captured for one in optional), self._connection.held]
        facts = self.hosts.exchange([int(each) for each in held])
        *captured, connected = (any(column) for column in zip(*facts, strict=True))
        for one, needed in zip(optional, captured, strict=True):
            if not needed:
                one.free()
        if not connected:
            self._connection.suspend()

    def resume(self) -> None:
        """Connect again what was connected before ``suspend``."""
        self._connection.resume()

    def abandon(self, capture: int) -> None:
        """Forget the first half of a split call that a failed capture has begun."""
        if isinstance(self._push, PushChannel):
            self._push.abandon(capture)

    def check(self) -> None:
        """Raise what NCCL reports asynchronously."""
        self._connection.check()

    def channels(self) -> list[_Channel]:
        """Return the channels of the push kernels."""
        every = (self._push, self._rows.channel, self._experts.channel)
        return [one for one in every if isinstance(one, _Channel)]

    def close(self, deadline: Deadline) -> None:
        """Free the channels and the communicators."""
        residency.release(self.hosts)
        channels = self.channels()
        self._end_channels("closed")
        for channel in channels:
            self.health.attempt(channel.close, deadline, "closing a channel")
        self._connection.close(deadline)

    def abort(self) -> None:
        """Abort the communicators; kernels that still run may use the channels' memory."""
        residency.release(self.hosts)
        _aborted.extend(self.channels())  # mapped for ever, on the host too
        self._end_channels("aborted")
        self._connection.abort()

    def _end_channels(self, how: str) -> None:
        self._push = how
        self._rows.end(how)
        self._experts.end(how)

    # -- what carries a call -----------------------------------------------------------------------

    def _pushes(self, call: Launch) -> bool:
        """Return True if push kernels carry a call."""
        name = call.launch.__name__
        pushed, nbytes = None, 0 if call.x is None else call.x.nbytes
        reduction = call.args[-1] if call.args else None
        if name == "all_gather":
            pushed = self._gathered
        elif name == "equal_parts":
            pushed, nbytes = self._parted, nbytes // self.size
        elif name == "all_reduce" and isinstance(reduction, Reduction):
            pushed = reduction.all_reduce
        elif name == "reduce_scatter" and isinstance(reduction, Reduction):
            pushed, nbytes = reduction.reduce_scatter, nbytes // self.size
        return pushed is not None and pushed.takes(nbytes)

    def resolve(self, dtype: torch.dtype, reduction: ReductionSpec) -> Any:
        """Return NCCL's numbers of a reduction, and the push kernels that carry it."""
        if reduction.op == "premul_sum":
            return scaled(reduction, copysign(1, reduction.factor))
        parts = dtype.itemsize // reduction.dtype.itemsize
        resolved = Reduction(reduction.op, parts, TYPES[reduction.dtype], OPS[reduction.op])
        if isinstance(self._push, str):
            return resolved
        kind = reduction.dtype, reduction.op
        all_reduce = PushCollective.reducing(self._push, "all_reduce", *kind)
        part = PushCollective.reducing(self._push, "reduce_scatter", *kind)
        return replace(resolved, all_reduce=all_reduce, reduce_scatter=part)

    def all_reduce(self, out: Tensor, x: Tensor, reduction: Reduction) -> None:
        """Launch a push kernel or ncclAllReduce."""
        pushed = reduction.all_reduce
        if pushed is not None and pushed(out, x, x.nbytes):
            return
        if reduction.premul is not None:
            self._with_factor(self.all_reduce, reduction.premul, out, x)
            return
        count, stream = x.numel() * reduction.parts, current_raw(self._index)
        self._ready().collective().allReduce(
            x.data_ptr(), out.data_ptr(), count, reduction.kind, reduction.op, stream
        )

    def fused_norm(self, x: Tensor, norm: Norm) -> tuple[Any, Any] | None:
        """Return the launch of the fused kernel for these rows, and its plan."""
        if self._normed is None or isinstance(self._push, str):
            return None
        steps = self._normed.steps(x, norm)
        return (self._normed.launch, steps) if steps else None

    def splits(self, x: Tensor, reduction: Any) -> bool:
        """Return True for what push kernels reduce by one launch."""
        pushed = reduction.all_reduce if isinstance(reduction, Reduction) else None
        return pushed is not None and pushed.split(x.nbytes) is not None

    def begin_all_reduce(self, out: Tensor, x: Tensor, reduction: Any) -> SplitAllReduce:
        """Launch the first half of a push all_reduce."""
        halves = reduction.all_reduce.split(x.nbytes)
        assert halves is not None
        assert not isinstance(self._push, str)
        return SplitAllReduce(self.identity, self.health, self._push, halves, out, x)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Launch a push kernel or ncclAllGather."""
        if self._gathered is not None and self._gathered(out, x, x.nbytes):
            return
        self._ready().collective().allGather(
            x.data_ptr(), out.data_ptr(), x.nbytes, BYTES, current_raw(self._index)
        )

    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: Reduction) -> None:
        """Launch a push kernel or ncclReduceScatter."""
        pushed = reduction.reduce_scatter
        if pushed is not None and pushed(out, x, out.nbytes):
            return
        if reduction.premul is not None:
            self._with_factor(self.reduce_scatter, reduction.premul, out, x)
            return
        count, stream = out.numel() * reduction.parts, current_raw(self._index)
        self._ready().collective().reduceScatter(
            x.data_ptr(), out.data_ptr(), count, reduction.kind, reduction.op, stream
        )

    def broadcast(self, out: Tensor | None, x: Tensor | None, root: int) -> None:
        """Launch ncclBroadcast."""
        source: Any = out if x is None else x
        target, stream = source if out is None else out, current_raw(self._index)
        self._ready().collective().broadcast(
            source.data_ptr(), target.data_ptr(), target.nbytes, BYTES, root, stream
        )

    def reduce(self, out: Tensor | None, x: Tensor, root: int, reduction: Reduction) -> None:
        """Launch ncclReduce."""
        if reduction.premul is not None:
            self._with_factor(self.reduce, reduction.premul, out, x, root)
            return
        target, stream = 0 if out is None else out.data_ptr(), current_raw(self._index)
        count = x.numel() * reduction.parts
        self._ready().collective().reduce(
            x.data_ptr(), target, count, reduction.kind, reduction.op, root, stream
        )

    def equal_parts(self, out: Tensor, x: Tensor, takes: list[int], sends: list[int]) -> None:
        """Launch a push kernel, or a send and a receive per peer."""
        if self._parted is None or not self._parted(out, x, takes[0] * x.itemsize):
            self.all_to_all(out, x, takes, sends)

    def prepare_rows(self) -> None:
        """Decide, together with the other members, what carries rows: a channel, or NCCL."""
        self._rows.prepare(self._claim)

    def prepare_experts(self) -> ExpertKernels | None:
        """Decide, together with the other members, whether kernels carry exchanges with experts."""
        return self._experts.prepare(self._claim)

    def exchange_rows(self, out: Tensor, x: Tensor, routes: Routes) -> Any:
        """Launch the row kernel, or sends and receives."""
        channel = self._rows.channel
        if channel is not None and channel.takes(routes):
            return channel.exchange(out, x, routes)
        self._ready().exchange()
        return super().exchange_rows(out, x, routes)

    def barrier(self, out: None, x: None) -> None:
        """Launch an all-reduce of one number."""
        token, kind, op = self._token.data_ptr(), TYPES[torch.int32], OPS["max"]
        comm = self._ready().collective()
        comm.allReduce(token, token, 1, kind, op, current_raw(self._index))

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

    def explain(self, nbytes: int, reduction: ReductionSpec) -> str:
        """Return what carries an all_reduce: the table's push kernel, or NCCL."""
        closed = self._push if isinstance(self._push, str) else None
        return explain(closed, reduction, nbytes, self.size, connected=self.connected)
