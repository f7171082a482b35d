"""One attempt to create one ring, which the threads of a process share."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
import torch.distributed as dist

from commlib import flags
from commlib.core.calls.log import level
from commlib.core.context import CommContext
from commlib.core.ring import RingSource
from commlib.deadlines import Deadline
from commlib.engines.base import Engine
from commlib.engines.c10d.gloo import GlooEngine
from commlib.engines.c10d.torch_distributed import TorchGlooEngine, TorchNCCLEngine
from commlib.engines.nccl.engine import NCCLEngine
from commlib.errors import CommError, CommTimeout, RingError
from commlib.log import log
from commlib.rendezvous import environment
from commlib.rendezvous.environment import World
from commlib.rendezvous.identity import Remedy, RingIdentity, program_remedy
from commlib.rendezvous.roll_call import Meeting, RollCall
from commlib.rendezvous.store import BoundedStore

# How long a close waits for a creation that it gives up: its loops look every 0.05 s.
GIVE_UP_S = 2.0

_ENGINES: dict[tuple[bool, bool], type[Engine]] = {
    (True, True): NCCLEngine,
    (True, False): GlooEngine,
    (False, True): TorchNCCLEngine,
    (False, False): TorchGlooEngine,
}


class _Pool:
    """The roll calls over one store: the idle ones, and the slots of all."""

    def __init__(self, *, kept: bool) -> None:
        self.kept = kept  # whether a roll call stays for later creations
        self.idle: list[RollCall] = []
        self.slots: set[int] = set()

    def take_slot(self) -> int:
        """Return the smallest slot that no roll call has, and take it."""
        slot = next(number for number in count() if number not in self.slots)
        self.slots.add(slot)
        return slot


class RollCalls:
    """The roll calls of this process, one for each creation that is under way in one store.

    A roll call belongs to one creation at a time, because it waits on its own connection. It is
    kept for later creations, unless the caller of the creation gave the store.
    """

    def __init__(self) -> None:
        self._pools: dict[Hashable, _Pool] = {}
        self._lock = threading.Lock()

    @contextmanager
    def borrowed(
        self, key: Hashable, home: Callable[[], BoundedStore], me: int, *, kept: bool
    ) -> Iterator[RollCall]:
        """Lend an idle roll call of the store ``key``, or a new one over ``home``."""
        with self._lock:
            pool = self._pools.setdefault(key, _Pool(kept=kept))
            call = pool.idle.pop() if pool.idle else None
            slot = pool.take_slot() if call is None else call.slot
        try:
            if call is None:
                store = home()
                call = RollCall(store.apart(), me, slot, store)
            yield call
        finally:
            self._give_back(key, pool, slot, call)

    def _give_back(self, key: Hashable, pool: _Pool, slot: int, call: RollCall | None) -> None:
        """Keep a roll call for a later creation, or end it and free its slot."""
        with self._lock:
            if call is not None and (pool.kept or call.unfinished):
                pool.idle.append(call)
                return
        if call is not None:
            call.end()  # before another one gets its slot
        with self._lock:
            pool.slots.discard(slot)
            if not pool.slots and self._pools.get(key) is pool:
                del self._pools[key]

    def drop_borrowed(self) -> list[RollCall]:
        """Forget the idle ones over a store of ``torch.distributed``; the caller ends them."""
        with self._lock:
            gone = []
            for key in [key for key in self._pools if isinstance(key, BorrowedKey)]:
                pool = self._pools[key]
                ended = [call for call in pool.idle if not call.unfinished]
                pool.kept = False
                pool.idle = [call for call in pool.idle if call.unfinished]
                pool.slots -= {call.slot for call in ended}
                if not pool.slots:
                    del self._pools[key]
                gone += ended
        return gone

    def clear(self) -> None:
        """Forget all of them, and with them their stores."""
        with self._lock:
            self._pools.clear()


class BorrowedKey(NamedTuple):
    """Tells one initialisation of ``torch.distributed`` from the next."""

    store: dist.Store
    prefix: str
    rank: int
    size: int


class Creation:
    """The creation of one ring: its members, its deadline, and at its end a ring or an error."""

    def __init__(
        self,
        source: RingSource,
        ring_id: int,
        members: tuple[int, ...],
        world: World,
        store: dist.Store | None,
        device: torch.device,
        deadline: Deadline,
        name: str = "",
        remedy: Remedy | None = None,
    ) -> None:
        self.source = source
        self.name, self.ring_id = name, ring_id
        self.remedy = remedy or program_remedy(ring_id, members)
        self.members, self.world, self.store = members, world, store
        self.device, self.deadline = device, deadline
        self.thread = threading.get_ident()
        self.ring: CommContext | None = None
        self.error: BaseException | None = None
        self._ended = threading.Event()

    @property
    def where(self) -> str:
        """The start of an error text."""
        return (
            f"creating ring {self.ring_id} of ranks {list(self.members)} on rank {self.world.rank}"
        )

    def build(self, calls: RollCalls) -> CommContext:
        """Meet the other members and set the engine up; every member has the ring then, or none.

        Raises:
            RingError: The creation was given up, members differ, or rings cross.
            CommTimeout: Members are missing at the deadline.
            BootstrapError: The store can't be used.
            EngineError: The engine failed on a member.
        """
        try:
            return self._build(calls)
        except CommError as error:
            if self.deadline.cancelled is None:
                raise
            raise self.given_up() from error

    def _build(self, calls: RollCalls) -> CommContext:
        unified, on_gpu = bool(flags.get(flags.UNIFIED)), self.device.type == "cuda"
        _log_engine_once(unified, on_gpu)
        engine = _ENGINES[unified, on_gpu]
        position = self.members.index(self.world.rank)
        identity = RingIdentity(
            self.ring_id,
            position,
            self.members,
            self.device,
            self.deadline.seconds,
            engine.name,
            self.remedy,
            self.name,
        )
        if len(self.members) == 1:
            return CommContext(self.source, identity, engine, None)
        kind = f"{engine.name} ({self.device.type}), {flags.CHECK}={level()}"
        persistent = self.store is None
        with calls.borrowed(self._key, self._home, self.world.rank, kept=persistent) as call:
            meeting = call.meet(self.ring_id, self.members, self.deadline, kind, self.remedy.create)
            build = partial(CommContext, self.source, identity, engine, meeting)
            return self._set_up(build, meeting)

    @property
    def _key(self) -> Hashable:
        """A key per store and per place of this rank in it."""
        world = self.world
        if self.store is not None:
            return self.store
        if world.address is None and dist.is_initialized():
            borrowed_store = dist.distributed_c10d._get_default_store()
            return BorrowedKey(borrowed_store, world.prefix, world.rank, world.size)
        return world.address, world.prefix, world.rank, world.size

    def _home(self) -> BoundedStore:
        if self.store is None:
            return environment.connect(self.world, self.deadline)
        return BoundedStore.of(self.store)

    def _set_up(self, build: Callable[[], CommContext], meeting: Meeting) -> CommContext:
        """Build and connect the ring; every member keeps it, or every member frees it."""
        ring, error = None, None
        try:
            ring = build()
            ring._open(meeting, self.deadline)
        except Exception as caught:  # every failure is reported to the other members
            error = caught
        except BaseException as caught:  # an interrupt: they learn of it, this thread goes on
            with suppress(CommError):
                meeting.finish(InterruptedError(repr(caught)), self.deadline)
            if ring is not None:
                ring.abort()
            raise
        try:
            meeting.finish(error, self.deadline)  # before the ring is freed, which others notice
        except BaseException:
            if ring is not None:
                ring.abort()
            raise
        assert ring is not None  # finish() raises on every member if one has failed
        return ring

    def given_up(self) -> RingError:
        """Return the error of a creation that a close or a shutdown has overtaken."""
        return RingError(
            f"{self.where} was given up: {self.deadline.cancelled} was called meanwhile; call "
            f"{self.remedy.create}"
        )

    def end(self, ring: CommContext | None, error: BaseException | None = None) -> None:
        """Record the outcome and wake the threads that wait for it."""
        self.ring, self.error = ring, error
        self._ended.set()

    def wait_given_up(self, deadline: Deadline) -> None:
        """Wait until the thread of a cancelled creation has left it, unless it is this one."""
        if self.thread != threading.get_ident():
            self._ended.wait(min(deadline.left(), GIVE_UP_S))

    def outcome(self, deadline: Deadline) -> CommContext | None:
        """Wait for the thread that creates the ring.

        Returns:
            The ring, or None if this caller has to try again: the other thread was interrupted,
            or had less time.

        Raises:
            CommTimeout: The creation was not over at ``deadline``.
            CommError: The creation failed.
        """
        if not self._ended.wait(deadline.left()):
            raise CommTimeout(
                f"{self.where}: another thread of this process began it and did not finish within "
                f"{deadline.seconds:g} s; raise timeout= or FLAGS_comm_timeout_s"
            )
        if isinstance(self.error, CommTimeout) or not isinstance(self.error, Exception):
            return self.ring
        if isinstance(self.error, CommError):  # each thread raises its own: tracebacks grow
            raise type(self.error)(str(self.error)) from self.error
        raise self.error


def _log_engine_once(unified: bool, on_gpu: bool) -> None:
    """Log once which engine the program runs on, and why."""
    row = next(row for row in flags.rows() if row["name"] == flags.UNIFIED)
    engine = ("nccl" if on_gpu else "gloo") if unified else "c10d"
    log.once("engine %s: %s=%d (%s)", engine, flags.UNIFIED, unified, row["source"])
