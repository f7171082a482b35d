"""One attempt to create one ring, which the threads of a process share."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch
import torch.distributed as dist

from commlib import _bootstrap, flags
from commlib._bootstrap import World
from commlib._call_log import level
from commlib._context import CommContext
from commlib._deadline import Deadline
from commlib._gloo import GlooCommContext
from commlib._legacy import LegacyCommContext
from commlib._log import log
from commlib._nccl import NCCLCommContext
from commlib._rollcall import Meeting, RollCall
from commlib._store import BoundedStore
from commlib.errors import CommError, CommTimeout, RingError

# How long a close waits for a creation that it gives up: its loops look every 0.05 s.
GIVE_UP_S = 2.0

_ENGINES: dict[tuple[bool, bool], type[CommContext]] = {
    (True, True): NCCLCommContext,
    (True, False): GlooCommContext,
    (False, True): LegacyCommContext,
    (False, False): LegacyCommContext,
}


class RollCalls:
    """The roll calls of this process, one for each creation that is under way in one store.

    A roll call belongs to one creation at a time, because it waits on its own connection. It is
    kept for later creations.
    """

    def __init__(self) -> None:
        self._idle: dict[object, list[RollCall]] = {}
        self._made: Counter[object] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def borrowed(
        self, key: object, home: Callable[[], BoundedStore], me: int
    ) -> Iterator[RollCall]:
        """Lend an idle roll call of the store ``key``, or a new one over ``home``."""
        with self._lock:
            idle = self._idle.setdefault(key, [])
            call = idle.pop() if idle else None
            slot = self._made[key]
            self._made[key] += call is None
        if call is None:
            store = home()
            call = RollCall(store.apart(), me, slot, store)
        try:
            yield call
        finally:
            idle.append(call)

    def clear(self) -> None:
        """Forget all of them, and with them their stores."""
        self._idle.clear()


class Creation:
    """The creation of one ring: its members, its deadline, and at its end a ring or an error."""

    def __init__(
        self,
        ring_id: int,
        members: tuple[int, ...],
        world: World,
        store: dist.Store | None,
        device: torch.device,
        deadline: Deadline,
    ) -> None:
        self.ring_id, self.members, self.world, self.store = ring_id, members, world, store
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
        place = self.ring_id, position, self.members, self.device, self.deadline
        if len(self.members) == 1:
            return engine(*place, None)
        kind = f"{engine.engine} ({self.device.type}), {flags.CHECK}={level()}"
        with calls.borrowed(self._key, self._home, self.world.rank) as call:
            given = self.ring_id, self.members, self.deadline, kind, engine.credentials
            return self._set_up(partial(engine, *place), call.meet(*given))

    @property
    def _key(self) -> object:
        """What tells the stores of creations apart."""
        return (self.world.address, self.world.prefix) if self.store is None else self.store

    def _home(self) -> BoundedStore:
        if self.store is None:
            return _bootstrap.connect(self.world, self.deadline)
        return BoundedStore.of(self.store)

    def _set_up(self, build: Callable[[Meeting], CommContext], meeting: Meeting) -> CommContext:
        """Build the engine's context; every member keeps it, or every member frees it."""
        ring, error = None, None
        try:
            ring = build(meeting)
        except Exception as caught:  # every failure is reported to the other members
            error = caught
        except BaseException as caught:  # an interrupt: they learn of it, this thread goes on
            with suppress(CommError):
                meeting.finish(InterruptedError(repr(caught)), self.deadline)
            raise
        try:
            meeting.finish(error, self.deadline)
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
            f"commlib.init() or commlib.new_ring(...) again on every member"
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
