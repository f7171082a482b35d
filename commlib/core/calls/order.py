"""Orders of calls on one ring: each group of ``torch.distributed`` over its ranks has one."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import get_ident
from typing import Any

from commlib.core.calls.call import Call
from commlib.core.calls.log import CallLog
from commlib.core.calls.reports import CallReports
from commlib.core.context import CommContext
from commlib.core.failures import is_gone, is_late
from commlib.core.posting import with_codes
from commlib.core.ring import Ring
from commlib.deadlines import Deadline, bounded
from commlib.engines.c10d.engine import C10dEngine
from commlib.errors import CommError, CommTimeout, EngineError, RingError
from commlib.rendezvous.host_exchange import gloo_round, host_number
from commlib.rendezvous.shared_memory import SharedMemoryAllGather, open_shared_memory
from commlib.rendezvous.store import BoundedStore, EngineStore

_REMEDY = "make the call in another group, or call new_group on every member"
_LOOK_S = 0.05  # how often a member looks for the others


class CallOrder:
    """An order of calls in addition to the ring's own: the calls inside ``run`` belong to it.

    On a CPU it has its own gloo connections, so its calls never meet those of another order. On a
    GPU the calls of all orders share the ring's communicator. They carry the name of the order, so
    that the check of calls finds an order that differs between ranks.

    Args:
        ring: The ring.
        name: The same on every member, and different for each order of the ring.
        engine: What launches the calls, on a CPU; None for the ring's own engine.
        reports: The order's own log of calls, on a CPU; None for the ring's.
        memory: What holds the order's board of calls, on a CPU of one host.
    """

    def __init__(
        self,
        ring: CommContext,
        name: str,
        engine: C10dEngine | None = None,
        reports: CallReports | None = None,
        memory: SharedMemoryAllGather | None = None,
    ) -> None:
        self.ring, self.name, self.engine, self._reports = ring, name, engine, reports
        self._memory = memory
        self.board = None if memory is None else with_codes(memory.board)
        if self.board is not None:
            ring._boards.append(self.board)
        self.log = None if reports is None else reports.calls
        self.ended = False
        self.fault: str | None = None  # why no call can be made
        self._error: type[CommError] = EngineError  # of calls that the end meets under way
        self._names: dict[str, str] = {}  # of collectives, with the order's own

    def run(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return ``call(*args, **options)``; what it calls on the ring belongs to this order."""
        orders, thread = self.ring._orders, get_ident()
        before = orders.get(thread)
        orders[thread] = self
        try:
            return call(*args, **options)
        finally:
            if before is None:
                del orders[thread]
            else:
                orders[thread] = before

    def take(self, call: Call[Any]) -> None:
        """Make a call one of this order.

        Raises:
            RingError: The order is closed or aborted. The ring goes on.
        """
        if self.fault is not None:
            raise RingError(self._unusable(call.collective))
        if call.order is not None:  # it is made again
            return
        call.order = self
        if call.entry is not None:
            collective = call.entry[0]
            name = self._names.get(collective)
            if name is None:
                name = self._names[collective] = f"{collective} in group {self.name!r}"
            call.entry = (name, *call.entry[1:])
        if self.engine is not None and getattr(call.launch, "__self__", None) is self.ring._engine:
            call.launch = getattr(self.engine, call.launch.__name__)

    def _unusable(self, collective: str) -> str:
        return f"{self.ring._describe(collective)}: group {self.name!r} {self.fault}; {_REMEDY}"

    def failed(
        self,
        collective: str,
        error: Exception,
        args: tuple[Any, ...] = (),
        seconds: float | None = None,
    ) -> CommError | None:
        """Return the error of a call that has ended the order, or ended with it.

        Args:
            collective: What the program has called.
            error: The failure.
            args: Those of the launch.
            seconds: The call's own deadline. Default: the ring's.

        Returns:
            The error; None if the failure is that of the ring.
        """
        ring = self.ring
        if self.engine is None or ring._health.fault is not None:
            return None
        if self.fault is None and is_late(error):
            return self._timed_out(collective, error, args, seconds)
        if self.fault is None and not is_gone(error):
            return None
        if self.fault is None:
            others = [rank for rank in ring.ranks if rank != ring.ranks[ring.rank]]
            whose = f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {others}"
            cause = "has aborted or closed it, gave up one of its calls or is not alive"
            self._end(f"was ended by {whose}, which {cause}")
        return self._error(self._unusable(collective))

    def _timed_out(
        self, collective: str, error: Exception, args: tuple[Any, ...], seconds: float | None
    ) -> CommError:
        """Return the error of a call whose deadline has passed, and end the order."""
        health = self.ring._health
        verdict = "" if self._reports is None else self._reports.verdict(collective)
        kind, reason = health.reason(collective, error, args, seconds, verdict)
        self._error = kind
        self._end(f"timed out in {collective}, which{reason}")
        logs = f"; {verdict}" if verdict else ""
        text = f"{self.ring._describe(collective)}{reason}{logs}; group {self.name!r} has ended"
        health.note(text)
        return kind(f"{text}; {_REMEDY}")

    def _end(self, fault: str) -> None:
        """Let later calls raise, and end those in flight: some members wait for this one alone."""
        assert self.engine is not None
        self.fault = self.fault or fault  # another thread may have ended it meanwhile
        self.engine.cut()

    @property
    def is_apart(self) -> bool:
        """True if the calls have their own connections, which can end before the ring."""
        return self.engine is not None

    def abort(self) -> None:
        """End the calls in flight, and free the connections of the order; the ring goes on."""
        if self.engine is not None and not self.ended and not self.ring._health.ended:
            self.ended, self.fault = True, "was aborted"  # first: waits of other threads end now
            if self._reports is not None:
                self._reports.abandon()
            self.engine.cut()
            self._free()
        self.close()

    def close(self) -> None:
        """Free the connections of the order; the ring goes on. A second call does nothing."""
        ended, self.ended = self.ended, True
        self.fault = self.fault or "is closed"
        if not ended:
            self._free()

    def _free(self) -> None:
        if self._memory is not None:
            self.ring._boards.remove(self._memory.board)
            self._memory.close()
        if self.engine is None or self.ring._health.ended:  # the ring has freed the rest
            return
        if self._reports is not None and self.ring._reports is not None:
            self.ring._reports.others.remove(self._reports)
            self._reports.close()
        base = self.ring._engine
        assert isinstance(base, C10dEngine)
        base.drop(self.engine, Deadline(self.ring.timeout))


def open_order(ring: CommContext, name: str, seconds: float) -> CallOrder | None:
    """Return a new order of calls on a ring; every member calls it, and waits for the others.

    Args:
        ring: The ring.
        name: The same on every member, and new for this ring.
        seconds: The longest wait for missing members.

    Returns:
        The order; None for a ring of one rank, and where nothing would compare the calls.

    Raises:
        CommTimeout: Members are missing; the text names them.
    """
    engine = ring._engine
    if ring.size == 1:
        return None
    if not (ring.device.type == "cpu" and isinstance(engine, C10dEngine)):
        return CallOrder(ring, name) if ring._call_log is not None else None
    keys = ring._hosts.store(f"order {ring._order_count} {name}")  # a name may come again
    deadline = Deadline(seconds)
    _meet(ring, name, keys, deadline)
    connecting = EngineStore(keys, deadline)
    make = partial(engine.apart, connecting, timedelta(seconds=ring.timeout))
    try:
        new_engine = bounded(make, deadline, ring._describe(f"connecting group {name!r}"))
    except CommTimeout:
        connecting.give_up()
        raise
    reports = memory = None
    try:
        if ring._board is not None:
            memory = _shared(ring, new_engine.pg)
        if ring._reports is not None:
            reports = CallReports(ring.ring_id, ring.rank, ring.ranks, ring.timeout, CallLog())
            reports.name, reports.found = name, ring._reports.found
            reports.open(lambda: keys.under("calls"))
            ring._reports.others.append(reports)
    except BaseException:
        if memory is not None:
            memory.close()
        engine.drop(new_engine, Deadline(ring.timeout))
        raise
    ring._order_count += 1
    return CallOrder(ring, name, new_engine, reports, memory)


def _shared(ring: CommContext, group: Any) -> SharedMemoryAllGather | None:
    """Return shared memory for the order's board; every member calls it."""
    by_gloo = partial(gloo_round, group, ring.rank, ring.size)
    return open_shared_memory(by_gloo, ring.rank, ring.size, host_number(), ring.timeout)


def _meet(ring: Ring, name: str, keys: BoundedStore, deadline: Deadline) -> None:
    """Wait until every member of the ring opens the order."""
    look = Deadline(deadline.seconds + 5)
    keys.set(f"here/{ring.rank}", "1", look)
    every = [f"here/{rank}" for rank in range(ring.size)]
    if deadline.poll(lambda: keys.check(every, look), longest_sleep=_LOOK_S):
        return
    late = [at for at in range(ring.size) if not keys.check([f"here/{at}"], look)]
    raise CommTimeout(
        f"{ring._describe(f'creating group {name!r}')}: timed out after {deadline.seconds:g} s, "
        f"waiting for ranks {[ring.ranks[at] for at in late]}; create the group on every member"
    )
