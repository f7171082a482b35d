"""The process-wide owner of every ring: it creates, finds, closes and reports them."""

import atexit
import copyreg
import os
import threading
from collections.abc import Iterable

import torch
import torch.distributed as dist

from commlib import flags, streams
from commlib.core.closing import abort_all, close_all, end_all
from commlib.core.context import CommContext
from commlib.core.creation import Creation, RollCalls
from commlib.core.devices import checked_device, default_device
from commlib.core.membership import (
    Seconds,
    check_place,
    checked_members,
    other_members,
    same_ring,
)
from commlib.core.process_exit import is_failing, watch_exit
from commlib.core.rings.report import RingReport
from commlib.core.rings.table import RingTable
from commlib.deadlines import Deadline
from commlib.keepalive import keep_forever
from commlib.log import log
from commlib.rendezvous import environment
from commlib.rendezvous.environment import World
from commlib.rendezvous.identity import Remedy
from commlib.rendezvous.roll_call import RollCall
from commlib.worker_threads import workers

# shutdown(abort=True) returns within 5 s; the exit of a program that fails waits for no rank.
_ABORT_ALL_S = 4.5
_FAILING_S = 0.5
_LAST_STEPS_S = 1.0


class CommContextManager:
    """Owns one ``CommContext`` per ring; ``instance()`` returns the manager of this process.

    The lock guards the tables below and is never held while anything waits: neither a creation
    nor a close holds up other calls. ``get`` and ``has`` take no lock.
    """

    def __init__(self) -> None:
        self._table = RingTable()
        self._creating: dict[int, Creation] = {}
        self._closing: list[CommContext] = []
        self._calls = RollCalls()
        self._lock = threading.RLock()
        self._device: torch.device | None = None
        self._world_of_rings: World | None = None  # set by the first ring, until no ring is left
        self._parent: tuple[int, World] | None = None
        self._process = os.getpid()

    @staticmethod
    def instance() -> "CommContextManager":
        """Return the manager of this process; it closes its rings when the interpreter exits."""
        return _manager

    def __repr__(self) -> str:
        return f"<CommContextManager of rings {self.rings()}>"

    def create(
        self,
        ring_id: int,
        ranks: Iterable[int],
        *,
        store: dist.Store | None = None,
        device: torch.device | str | None = None,
        timeout: Seconds | None = None,
        name: str = "",
        world: World | None = None,
        remedy: Remedy | None = None,
    ) -> CommContext:
        """Return a new ring, or the one that exists; called by its members alone.

        Blocks until every member has called it. Threads that create the same ring at the same
        time get one context. ``close`` and ``shutdown`` in another thread give the creation up.

        Args:
            ring_id: A whole number >= 0.
            ranks: Global ranks in the order of the ring. If the ring exists with the same ranks,
                it is returned; an aborted ring is created again.
            store: Carries the meeting in place of the program's own store.
            device: Default: the device of ``init``.
            timeout: Seconds until missing ranks are an error, and of later waits on a CPU.
                Default: FLAGS_comm_timeout_s.
            name: The program's own name of the ring, for ``commlib.comm(name)`` and messages.
            world: This process's place among the ranks. Default: that of its rings, or without
                rings the launcher's.
            remedy: For error texts. Default: the calls of ``init`` or ``new_ring``.

        Raises:
            ArgumentError: An argument can't be read.
            RingError: This rank is not a member, the ring exists with other ranks, device or
                timeout, it has failed, or the creation was given up.
            RingOrderError: Members create rings in different orders.
            CommTimeout: Ranks are missing; the text names them.
            BootstrapError: The store can't be used.
            EngineError: The engine failed on a member. After any error nothing has changed.
        """
        deadline = Deadline(flags.get(flags.TIMEOUT) if timeout is None else timeout)
        while True:
            with self._lock:
                world = world or self._world()
                members = checked_members(ring_id, ranks, world)
                check_place(ring_id, members, world, self._parent)
                existing = self._table.usable(ring_id)
                self._table.check_name(ring_id, name)
                if existing is not None:
                    return same_ring(existing, members, device=device, timeout=timeout)
                shared = self._creating.get(ring_id)
                if shared is None:
                    chosen = self._place(world, device)
                    creation = Creation(
                        self, ring_id, members, world, store, chosen, deadline, name, remedy
                    )
                    flags.freeze()
                    self._creating[ring_id] = creation
            if shared is None:
                return self._run(creation)
            if shared.members != members:
                raise other_members(ring_id, "is being created", shared.members, members)
            ring = shared.outcome(deadline)
            if ring is not None:
                return ring

    def _world(self) -> World:
        """Return this process's place among the ranks; it stays while there are rings."""
        return self._world_of_rings or environment.world()

    def _run(self, creation: Creation) -> CommContext:
        """Create the ring of ``creation`` without the lock, and publish it."""
        ring, ring_id = None, creation.ring_id
        try:
            if len(creation.members) > 1:
                workers.reserve()
                watch_exit()
            ring = creation.build(self._calls)
            with self._lock:
                if creation.deadline.cancelled is not None:
                    raise creation.given_up()
                del self._creating[ring_id]
                self._table.add(ring)
                self._world_of_rings = creation.world
            log.info("created %r", ring)
        except BaseException as error:
            if ring is not None:
                ring.abort()
            with self._lock:
                if self._creating.get(ring_id) is creation:
                    del self._creating[ring_id]
                gone = self._thaw_if_empty()
            creation.end(None, error)
            end_all(gone)
            raise
        creation.end(ring)
        return ring

    def _place(self, world: World, device: torch.device | str | None) -> torch.device:
        """The device of a ring: as given, else as ``init`` chose, else chosen now."""
        if device is not None:
            return checked_device(device)
        self._device = self._device or default_device(world, None)
        return self._device

    def get(self, ring: "int | str | CommContext") -> CommContext:
        """Return a ring by its id or its name; a ring itself is returned if it is open.

        Args:
            ring: The id, the name or the ring.

        Raises:
            RingError: There is no such ring on this rank; the text lists those that exist.
        """
        return self._table.get(ring)

    def has(self, ring_id: int | str | CommContext) -> bool:
        """Return True if a ring exists on this rank.

        Args:
            ring_id: Its id, its name or the ring.
        """
        table = self._table
        return table.number(ring_id) in table.open and not table.is_replaced(ring_id)

    def rings(self) -> list[int]:
        """Return the ids of the rings on this rank, in the order of their creation."""
        return self._table.ids()

    def report(self) -> list[RingReport]:
        """Return ``CommContext.report()`` of every ring on this rank."""
        return [ring.report() for ring in list(self._table.open.values())]

    def close(self, ring_id: int | str | CommContext | None = None, abort: bool = False) -> None:
        """Close one ring, or all in reverse order of creation; a closed ring is not an error.

        Waits for the calls that are under way, then aborts. A creation of the ring in another
        thread is given up.

        Args:
            ring_id: Its id, its name or the ring; None for all rings.
            abort: Wait for no call. Returns within 5 s, whatever other threads do.

        Raises:
            RingError: The ring never existed.
        """
        if not self._table.is_replaced(ring_id):
            self._close(self._table.number(ring_id), abort, _ABORT_ALL_S)

    def _close(self, ring_id: int | None, abort: bool, seconds: float) -> None:
        deadline, name = Deadline(seconds), "shutdown()" if ring_id is None else f"close({ring_id})"
        with self._lock:
            creations = [one for one in self._creating.values() if ring_id in (None, one.ring_id)]
            if ring_id is not None and not creations:
                self._table.check_known(ring_id)
            for creation in creations:
                creation.deadline.cancel(name)
                self._creating.pop(creation.ring_id)
            rings = self._table.take(ring_id)
            others = [ring for ring in self._closing if ring_id in (None, ring.ring_id)]
            self._closing += rings
            self._table.closed.update(creation.ring_id for creation in creations)
        try:
            errors = abort_all(rings + others, deadline) if abort else close_all(rings)
        finally:
            with self._lock:
                self._closing = [ring for ring in self._closing if ring not in rings]
                gone = self._thaw_if_empty()
            end_all(gone)
        for creation in creations:
            creation.wait_given_up(deadline)
        if errors:
            raise errors[0]

    def _thaw_if_empty(self) -> list[RollCall]:
        """Forget what holds while there are rings; return the roll calls that the caller ends."""
        if self._table.open or self._creating or self._closing:
            return []
        flags.thaw()
        self._world_of_rings = None
        return self._calls.drop_borrowed()

    def _at_exit(self) -> None:
        failing = is_failing() or any(ring._health.has_failed for ring in self._table.open.values())
        seconds = flags.get(flags.CLOSE_TIMEOUT)
        try:
            self._close(None, failing, _FAILING_S)
            if not failing:  # another thread may be closing rings
                Deadline(seconds).poll(lambda: not self._closing)
        finally:
            self._calls.clear()
            environment.leave(Deadline(_FAILING_S if failing else seconds), wait=not failing)
            workers.await_steps(_FAILING_S if failing else _LAST_STEPS_S)

    def _after_fork(self) -> None:
        """Forget every ring in a forked child, without any call to an engine or a socket.

        Nothing is freed: destructors would join threads that the child lacks. The lock is new.
        """
        parent, self._process = self._process, os.getpid()
        self._lock = threading.RLock()
        workers.forget()
        streams.forget()
        environment.forget()
        keep_forever(dict(vars(self)), list(self._creating.values()), list(self._closing))
        self._table.forget(parent, self._closing, self._creating)
        if self._world_of_rings is not None:
            self._parent = parent, self._world_of_rings
        self._creating, self._closing, self._calls = {}, [], RollCalls()
        self._device = self._world_of_rings = None
        flags.thaw()


copyreg.pickle(CommContext, lambda ring: (comm, (ring.ring_id,)))  # a copy is the same ring
_manager = CommContextManager()
_rings = _manager._table.open  # looked up at every call
atexit.register(_manager._at_exit)
os.register_at_fork(after_in_child=_manager._after_fork)


def comm(ring_id: int | str | CommContext = 0) -> CommContext:
    """Return a ring by its id or its name; a ring itself is returned if it is open.

    Args:
        ring_id: The id, the name or the ring.

    Raises:
        RingError: There is no such ring on this rank; the text lists those that exist.
    """
    try:
        return _rings[ring_id]  # type: ignore[index]  # anything but an id is looked up below
    except (KeyError, TypeError):
        return _manager.get(ring_id)  # which raises the error
