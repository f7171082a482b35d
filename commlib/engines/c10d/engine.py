"""The collectives over a process group: what the gloo and torch.distributed engines share."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy as same_but
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
from torch._C import _distributed_c10d as c10d

from commlib.deadlines import Deadline, bounded
from commlib.engines.base import ABORT_S, Engine
from commlib.engines.c10d.plans import Plan, options_of, plan_of
from commlib.engines.c10d.then import Then
from commlib.engines.local import as_bytes, copy, divide, flat, multiplied
from commlib.engines.reductions import Reducer, ReductionSpec
from commlib.errors import CommTimeout
from commlib.rendezvous import host_exchange
from commlib.rendezvous.hosts import HostExchange
from commlib.rendezvous.identity import Health, RingIdentity
from commlib.rendezvous.roll_call import Meeting
from commlib.rendezvous.store import EngineStore
from commlib.waits import OVER, SLICE_S, Dropped, Interruptible, PointToPoint

Tensor = torch.Tensor

# While torch waits, Python runs no signal handler, so a wait is cut into slices of this length.
_SLICE = timedelta(seconds=SLICE_S)
_SLICE_OVER = "Operation timed out"  # in torch's error when a slice ends


class C10dEngine(Engine):
    """Collectives of a process group ``pg`` that no other code knows of."""

    reducer: ClassVar[Reducer] = Reducer("c10d", unsigned=False, bitwise=True)

    look: Callable[[], None] | None = None  # raises where the members' calls differ

    pg: Any = None
    _limit: Deadline | None = None  # of the calls that are launched now
    _steps: list[Callable[[], object]] | None = None  # after the group of launches that is open

    def __init__(self, identity: RingIdentity, hosts: HostExchange, health: Health) -> None:
        super().__init__(identity, hosts, health)
        self.on_host = identity.device.type == "cpu"
        self._token = torch.zeros(1, dtype=torch.int32, device=identity.device)
        self._apart: list[C10dEngine] = []
        self._dropped: defaultdict[tuple[str, int], Dropped] = defaultdict(Dropped)

    def open(self, meeting: Meeting, deadline: Deadline) -> None:
        """Make the process group."""
        store, wait = meeting.engine_store(deadline), timedelta(seconds=self.identity.timeout)
        # A group waits in the store and in its sockets, there for the time limit of its calls.
        make = partial(self._make, store, wait)
        try:
            self.pg = bounded(make, deadline, self.identity.describe("connecting"))
        except CommTimeout:
            store.give_up()
            raise
        if self.on_host:
            self.hosts.share_group(self.pg)

    @abstractmethod
    def _make(self, store: EngineStore, wait: timedelta) -> Any: ...

    def wait(self, handle: Any, deadline: Deadline | None = None) -> None:
        """Block until a launched call has ended."""
        if isinstance(handle, Interruptible):
            handle.wait(deadline)
            return
        while not handle.is_completed():
            if deadline is not None and deadline.passed():
                raise RuntimeError(OVER)
            try:
                handle.wait(_SLICE if deadline is None else min(_SLICE, deadline.timedelta()))
            except RuntimeError as error:
                if self.look is not None:  # also after a failure: it may be that of the other rank
                    self.look()
                if _SLICE_OVER not in str(error):
                    raise
            else:
                return
        handle.wait()

    def _issued(self, work: Any) -> Any:
        """Join the result now if the stream orders it; nothing is left to wait for."""
        if self.on_host:
            return work
        if work is not None:  # torch gives no work for what it issued on the caller's own stream
            work.wait()
        return None

    def resolve(self, dtype: torch.dtype, reduction: ReductionSpec) -> Plan:
        """Return c10d's options of a reduction."""
        return plan_of(dtype, reduction, on_host=self.on_host)

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Give the launches inside their own deadline; the issue lock is held."""
        every = (self, *self._apart)
        for one in every:
            one._limit = Deadline(seconds)
        try:
            yield
        finally:
            for one in every:
                one._limit = None

    def _reduced(self, work: Any, out: Tensor, plan: Plan) -> Any:
        if not plan.divides:
            return self._issued(work)
        # complex numbers by their parts, unsigned ones as what they are
        target = flat(out, plan.dtype) if plan.dtype.is_floating_point else out
        step = partial(divide, target, self.size)
        if self.on_host:
            return Then(self, work, step)
        self._issued(work)
        if self._steps is None:
            step()
        else:
            self._steps.append(step)
        return None

    def all_reduce(self, out: Tensor, x: Tensor, plan: Plan) -> Any:
        """Launch an all_reduce of the process group."""
        if plan.factor is not None:
            multiplied(out, x, plan.factor)
        elif out.shape != x.shape:
            copy(out, x)
        elif out is not x and out.data_ptr() != x.data_ptr():  # written out: the frequent call
            out.copy_(x)
        target = out if plan.dtype is out.dtype else flat(out, plan.dtype)
        options = plan.all_reduce
        if self._limit is not None:
            options = options_of(c10d.AllreduceOptions, self._limit)
            options.reduceOp = plan.op
        work = self.pg.allreduce([target], options)
        if self.on_host and not plan.divides:
            return work
        return self._reduced(work, out, plan)

    def all_gather(self, out: Tensor, x: Tensor) -> Any:
        """Launch an all_gather of the process group."""
        options = options_of(c10d.AllgatherOptions, self._limit)
        return self._issued(self.pg._allgather_base(as_bytes(out), as_bytes(x), options))

    def reduce_scatter(self, out: Tensor, x: Tensor, plan: Plan) -> Any:
        """Launch a reduce_scatter of the process group."""
        if plan.factor is not None:
            x = multiplied(None, x, plan.factor)
        target = flat(out, plan.dtype)
        options = options_of(c10d.ReduceScatterOptions, self._limit)
        options.reduceOp = plan.op
        work = self.pg._reduce_scatter_base(target, flat(x, plan.dtype), options)
        return self._reduced(work, out, plan)

    def broadcast(self, out: Tensor | None, x: Tensor | None, root: int) -> Any:
        """Launch a broadcast of the process group."""
        copy(out, x)
        held = x if out is None else out
        assert held is not None
        options = options_of(c10d.BroadcastOptions, self._limit)
        options.rootRank = root
        return self._issued(self.pg.broadcast([as_bytes(held)], options))

    def reduce(self, out: Tensor | None, x: Tensor, root: int, plan: Plan) -> Any:
        """Launch a reduce of the process group."""
        # c10d reduces in place and may leave partial sums on the other ranks.
        if plan.factor is not None:
            out = multiplied(out, x, plan.factor)
        elif out is None:
            out = x.clone()
        else:
            copy(out, x)
        target = flat(out, plan.dtype)
        options = options_of(c10d.ReduceOptions, self._limit)
        options.rootRank = root
        options.reduceOp = plan.op
        return self._reduced(self.pg.reduce([target], options), out, plan)

    def gather(self, out: Tensor | None, x: Tensor, root: int) -> Any:
        """Launch a gather of the process group."""
        options = options_of(c10d.GatherOptions, self._limit)
        options.rootRank = root
        parts = [] if out is None else [list(as_bytes(out).chunk(self.size))]
        return self._issued(self.pg.gather(parts, [as_bytes(x)], options))

    def scatter(self, out: Tensor, x: Tensor | None, root: int) -> Any:
        """Launch a scatter of the process group."""
        options = options_of(c10d.ScatterOptions, self._limit)
        options.rootRank = root
        parts = [] if x is None else [list(as_bytes(x).chunk(self.size))]
        return self._issued(self.pg.scatter([as_bytes(out)], parts, options))

    def all_to_all(self, out: Tensor, x: Tensor, takes: list[int], sends: list[int]) -> Any:
        """Launch an all_to_all of the process group."""
        target, source = as_bytes(out), as_bytes(x)
        scale = 1 if target.dtype is out.dtype else out.itemsize
        options = options_of(c10d.AllToAllOptions, self._limit)
        work = self.pg.alltoall_base(
            target, source, [n * scale for n in takes], [n * scale for n in sends], options
        )
        return self._issued(work)

    def send(self, out: None, x: Tensor, peer: int, tag: int = 0) -> Any:
        """Launch a send of the process group."""
        data = as_bytes(x)
        return self._between_two(self.pg.send([data], peer, tag), data, ("send", peer))

    def recv(self, out: Tensor, x: None, peer: int, tag: int = 0) -> Any:
        """Launch a receive of the process group."""
        data = as_bytes(out)
        return self._between_two(self.pg.recv([data], peer, tag), data, ("recv", peer))

    def _between_two(self, work: Any, data: Tensor, way: tuple[str, int]) -> Any:
        if not self.on_host:
            return self._issued(work)
        return PointToPoint([work], self._limit, self.look, data, self._dropped[way])

    def barrier(self, out: None, x: None) -> Any:
        """Launch a barrier of the process group."""
        if not self.on_host:  # an all-reduce on the stream; c10d's own blocks the host
            plan = self.resolve(torch.int32, ReductionSpec(torch.int32, "max"))
            return self.all_reduce(self._token, self._token, plan)
        return self.pg.barrier(options_of(c10d.BarrierOptions, self._limit))

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """On NCCL one group of launches; gloo starts each at once and blocks for none."""
        if self.on_host:
            yield
            return
        self.pg._start_coalescing(self.device)
        outer = self._steps
        steps = self._steps = []
        try:
            yield
        finally:
            self._steps = outer
            work = self.pg._end_coalescing(self.device)
        if work is not None:
            work.wait()
        for step in steps:
            step()

    # -- the end -----------------------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        """Release the process group."""
        self._release(deadline)

    def abort(self) -> None:
        """End the calls in flight, and release the process group."""
        for one in (self, *self._apart):
            one.cut()
        self._release(Deadline(ABORT_S))

    def cut(self) -> None:
        """End the calls in flight on a host, on this rank and soon on its peers."""
        if self.on_host and self.pg is not None:
            cut = partial(host_exchange.cut, self.pg)
            self.health.attempt(cut, Deadline(ABORT_S), "aborting")

    def _release(self, deadline: Deadline) -> None:
        for one in (*self._apart, self):
            one._end_dropped()
            group, one.pg = [one.pg], None
            if group[0] is not None:
                release = partial(host_exchange.release, group)
                self.health.attempt(release, deadline, "releasing the process group")

    def _end_dropped(self) -> None:
        """End the threads that wait for dropped handles: they would hold the connections."""
        dropped = list(self._dropped.values())
        for one in dropped:
            one.close()
        if not Deadline(SLICE_S).poll(lambda: all(one.ended for one in dropped)):
            self.cut()

    # -- other orders of calls ---------------------------------------------------------------------

    def apart(self, store: EngineStore, wait: timedelta) -> "C10dEngine":
        """Return an engine with its own connections, whose calls never meet those of this one.

        Every member calls it. It ends with this engine, or by ``drop``.
        """
        other = same_but(self)
        other.pg, other._dropped = self._make(store, wait), defaultdict(Dropped)
        self._apart.append(other)
        return other

    def drop(self, other: "C10dEngine", deadline: Deadline) -> None:
        """Release an engine that ``apart`` has made."""
        self._apart.remove(other)
        other._apart = []
        other._release(deadline)
