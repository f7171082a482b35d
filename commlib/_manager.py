"""The process-wide owner of every ring: it creates, finds, closes and reports them."""

import atexit
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from commlib import _bootstrap, flags
from commlib._bootstrap import World
from commlib._context import CommContext
from commlib._deadline import Deadline
from commlib._devices import checked_device, default_device
from commlib._dtypes import OPS
from commlib._gloo import GlooCommContext
from commlib._legacy import LegacyCommContext
from commlib._log import log
from commlib._nccl import NCCLCommContext
from commlib._rollcall import Meeting, RollCall
from commlib.errors import ArgumentError, CommError, DeviceError, RingError

Seconds = float | timedelta


class CommContextManager:
    """Owns one ``CommContext`` for each ring; ``instance()`` is the one of this process.

    Creating and closing are serialised by one lock; ``get`` and ``has`` take none.
    """

    def __init__(self) -> None:
        self._rings: dict[int, CommContext] = {}
        self._closed: set[int] = set()
        self._elsewhere: dict[int, tuple[int, ...]] = {}  # rings that this rank is no member of
        self._calls: dict[Any, RollCall] = {}
        self._lock = threading.RLock()
        self._device: torch.device | None = None

    @staticmethod
    def instance() -> "CommContextManager":
        """Return the manager of this process; it closes its rings when the interpreter exits."""
        return _manager

    # -- create ----------------------------------------------------------------------------------

    def create(
        self,
        ring_id: int,
        ranks: Iterable[int],
        *,
        store: dist.Store | None = None,
        device: torch.device | str | None = None,
        timeout: Seconds | None = None,
    ) -> CommContext:
        """Create ring ``ring_id`` of the global ``ranks``; called by its members alone.

        Blocks until every member has called it, at most ``timeout`` seconds (default: the flag
        FLAGS_comm_timeout_s). The ring exists already with the same members: returns it. ``store``
        carries the meeting instead of the program's own; ``device`` defaults to ``init``'s.
        Raises ``ArgumentError``, ``RingError`` (not a member, other members), ``RingOrderError``,
        ``CommTimeout`` naming the missing ranks, ``BootstrapError``, ``EngineError``; then nothing
        has changed.
        """
        with self._lock:
            world = _bootstrap.world()
            members = self._members(ring_id, ranks, world)
            if world.rank not in members:
                raise RingError(
                    f"creating ring {ring_id} on rank {world.rank}: the ring's ranks are "
                    f"{list(members)}; only members create it; type commlib.new_ring(...), which "
                    f"returns None elsewhere"
                )
            known = self._rings.get(ring_id)
            if known is not None:
                return self._same(known, members)
            deadline = Deadline(flags.get(flags.TIMEOUT) if timeout is None else timeout)
            where = self._place(world, device)
            flags.freeze()
            try:
                context = self._build(ring_id, members, world, store, where, deadline)
            except BaseException:
                self._thaw_if_empty()
                raise
            self._rings[ring_id] = context
            self._closed.discard(ring_id)
            self._elsewhere.pop(ring_id, None)
            return context

    def _members(self, ring_id: int, ranks: Iterable[int], world: World) -> tuple[int, ...]:
        if isinstance(ring_id, bool) or not isinstance(ring_id, int) or ring_id < 0:
            raise RingError(f"ring_id={ring_id!r}: expected a whole number >= 0")
        members = _whole_numbers(ring_id, ranks, world)
        wrong = [rank for rank in members if not 0 <= rank < world.size]
        if not members or wrong or len(set(members)) != len(members):
            raise RingError(
                f"ring {ring_id} on rank {world.rank}: ranks={list(members)}; expected one or more "
                f"different global ranks from 0 to {world.size - 1}"
            )
        return members

    def _same(self, known: CommContext, members: tuple[int, ...]) -> CommContext:
        if known.ranks == members:
            return known
        raise RingError(
            f"ring {known.ring_id} exists with ranks {list(known.ranks)}; given {list(members)}. "
            f"type another ring id, or commlib.CommContextManager.instance().close("
            f"{known.ring_id}) on its members first"
        )

    def _place(self, world: World, device: torch.device | str | None) -> torch.device:
        """The device of a ring: as given, else as ``init`` chose, else chosen now."""
        if device is None:
            if self._device is None:
                self._device = default_device(world, None)
            return self._device
        return checked_device(torch.device(device))

    def _build(
        self,
        ring_id: int,
        members: tuple[int, ...],
        world: World,
        store: dist.Store | None,
        device: torch.device,
        deadline: Deadline,
    ) -> CommContext:
        unified, on_gpu = bool(flags.get(flags.UNIFIED)), device.type == "cuda"
        log_engine_once(unified, on_gpu)
        engine = _ENGINES[unified, on_gpu]
        build = partial(engine, ring_id, members.index(world.rank), members, device, deadline)
        if len(members) == 1:
            return build(None)
        call = self._roll_call(world, store, deadline)
        kind = f"{engine.engine} ({device.type})"
        meeting = call.meet(ring_id, members, deadline, kind, engine.credentials)
        return _set_up(build, meeting, deadline)

    def _roll_call(self, world: World, store: dist.Store | None, deadline: Deadline) -> RollCall:
        key = (world.address, world.prefix) if store is None else store
        if key not in self._calls:
            found = _bootstrap.connect(world, deadline) if store is None else store
            self._calls[key] = RollCall(found, world.rank)
        return self._calls[key]

    # -- find ------------------------------------------------------------------------------------

    def get(self, ring_id: int) -> CommContext:
        """Return the context of ``ring_id``; raises ``RingError`` listing the rings there are."""
        try:
            return self._rings[ring_id]
        except (KeyError, TypeError):
            raise self._unknown(ring_id) from None

    def _unknown(self, ring_id: int) -> RingError:
        if not hasattr(ring_id, "__index__") or ring_id < 0:
            names = isinstance(ring_id, str) and ring_id in OPS
            hint = f"; type op={ring_id!r} for a reduction" if names else ""
            return RingError(
                f"ring_id={ring_id!r}: expected a whole number >= 0; rings here: {self.rings()}"
                f"{hint}"
            )
        if ring_id in self._elsewhere:
            members = list(self._elsewhere[ring_id])
            return RingError(
                f"this rank is no member of ring {ring_id} ({members}); rings here: "
                f"{self.rings()}; call it on its members alone: new_ring returns None elsewhere"
            )
        if ring_id == 0 and not self._rings:
            hint = "type commlib.init() first"
        else:
            hint = f"type commlib.new_ring({ring_id}, ranks) on its members first"
        state = "was closed" if ring_id in self._closed else "does not exist on this rank"
        return RingError(f"ring {ring_id!r} {state}; rings here: {self.rings()}; {hint}")

    def has(self, ring_id: int) -> bool:
        """Whether ``ring_id`` exists on this rank."""
        return ring_id in self._rings

    def rings(self) -> list[int]:
        """Return the ids of the rings on this rank, in the order of their creation."""
        return list(self._rings)

    def report(self) -> list[dict[str, Any]]:
        """Return one dict a ring: ids, engine, ranks, state, calls, communicator and its bytes."""
        return [
            {
                "ring_id": c.ring_id,
                "engine": c.engine,
                "ranks": list(c.ranks),
                "rank": c.rank,
                "size": c.size,
                "device": str(c.device),
                "state": c.state,
                "calls": c.calls,
                "last": c.last_verb,
                "communicator": c.has_communicator,
                "bytes": c.communicator_bytes,
                "workspace_bytes": c.workspace_bytes,
            }
            for c in list(self._rings.values())
        ]

    # -- close -----------------------------------------------------------------------------------

    def close(self, ring_id: int | None = None, abort: bool = False) -> None:
        """Close one ring, or all in reverse order of creation; a closed ring is no error.

        Waits for what is under way, at most FLAGS_comm_close_timeout_s seconds a ring, then aborts;
        ``abort=True`` does not wait. Raises ``RingError`` for a ring that never existed.
        """
        with self._lock:
            if ring_id is None:
                self._elsewhere.clear()
            elif ring_id not in self._rings:
                if ring_id in self._closed:
                    return
                raise self._unknown(ring_id)
            chosen = [ring_id] if ring_id is not None else list(reversed(self._rings))
            errors = [error for one in chosen if (error := self._close_one(one, abort))]
            self._thaw_if_empty()
            if errors:
                raise errors[0]

    def _close_one(self, ring_id: int, abort: bool) -> Exception | None:
        """Close one ring; what goes wrong must not keep the others open."""
        context = self._rings.pop(ring_id)
        self._closed.add(ring_id)
        try:
            if abort:
                context.abort()
            else:
                context.close(Deadline(flags.get(flags.CLOSE_TIMEOUT)))
        except Exception as error:
            return error
        return None

    def _thaw_if_empty(self) -> None:
        if not self._rings:
            flags.thaw()

    def _at_exit(self) -> None:
        try:
            self.close()
        finally:
            self._calls.clear()
            _bootstrap.leave(Deadline(flags.get(flags.CLOSE_TIMEOUT)))


def _whole_numbers(ring_id: int, ranks: Iterable[int], world: World) -> tuple[int, ...]:
    try:
        return tuple(index(rank) for rank in ranks)
    except TypeError:
        raise ArgumentError(
            f"ring {ring_id} on rank {world.rank}: ranks={ranks!r}; expected whole numbers from 0 "
            f"to {world.size - 1}; type for example commlib.new_ring({ring_id}, [0])"
        ) from None


def _set_up(
    build: Callable[[Meeting], CommContext], meeting: Meeting, deadline: Deadline
) -> CommContext:
    """Build the engine's context; it stands on every member or on none."""
    context, error = None, None
    try:
        context = build(meeting)
    except Exception as caught:  # the other members must hear of it, whatever it is
        error = caught
    try:
        meeting.finish(error, deadline)
    except CommError:
        if context is not None:
            context.abort()
        raise
    assert context is not None  # finish() raises on every member if one has failed
    return context


_ENGINES: dict[tuple[bool, bool], type[CommContext]] = {
    (True, True): NCCLCommContext,
    (True, False): GlooCommContext,
    (False, True): LegacyCommContext,
    (False, False): LegacyCommContext,
}
_manager = CommContextManager()
_rings = _manager._rings  # looked up at every call
atexit.register(_manager._at_exit)


def log_engine_once(unified: bool, on_gpu: bool) -> None:
    """Say once which engine the program runs on, and why."""
    row = next(row for row in flags.rows() if row["name"] == flags.UNIFIED)
    engine = ("nccl" if on_gpu else "gloo") if unified else "c10d"
    log.once("engine %s: %s=%d (%s)", engine, flags.UNIFIED, unified, row["source"])


def init(
    backend: str | None = None,
    *,
    device: torch.device | str | None = None,
    timeout: Seconds | None = None,
) -> CommContext:
    """Find the other ranks and return ring 0, which holds all of them.

    Reads torchrun's or Paddle's environment, or joins an initialised ``torch.distributed``; without
    any the ring has size 1. ``backend`` "nccl" (GPUs) or "gloo" (CPUs) overrides the choice by what
    is there; ``device`` names this rank's GPU. Makes the GPU the current one. Blocks until all
    ranks have come, at most ``timeout`` seconds. Calling it again returns the same ring.
    Raises ``BootstrapError``, ``DeviceError``, ``CommTimeout`` naming the missing ranks.
    """
    manager = _manager
    world = _bootstrap.world()
    where = (
        default_device(world, backend) if device is None else checked_device(torch.device(device))
    )
    if backend is not None and (backend == "nccl") != (where.type == "cuda"):
        raise DeviceError(
            f"backend={backend!r} with device {where}: nccl runs on GPUs, gloo on CPUs"
        )
    known = manager._rings.get(0)
    if known is not None and known.device != where:
        raise RingError(f"ring 0 exists on {known.device}; given {where}; commlib.shutdown() first")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    ring = manager.create(0, range(world.size), device=where, timeout=timeout)
    manager._device = where
    return ring


def new_ring(
    ring_id: int, ranks: Iterable[int], *, timeout: Seconds | None = None
) -> CommContext | None:
    """Create ring ``ring_id`` of the global ``ranks`` and return it; other ranks get None at once.

    Blocks the members until all have come, at most ``timeout`` seconds. Errors as
    ``CommContextManager.create``.
    """
    world = _bootstrap.world()
    members = _manager._members(ring_id, ranks, world)
    if world.rank not in members:
        _manager._elsewhere[ring_id] = members
        return None
    return _manager.create(ring_id, members, timeout=timeout)


def comm(ring_id: int = 0) -> CommContext:
    """Return the context of ``ring_id``; raises ``RingError`` listing the rings there are."""
    try:
        return _rings[ring_id]
    except (KeyError, TypeError):
        return _manager.get(ring_id)  # which says what is wrong


def shutdown(*, abort: bool = False) -> None:
    """Close every ring in reverse order of creation and let the flags change again.

    Waits for what is under way, at most FLAGS_comm_close_timeout_s seconds a ring; ``abort=True``
    does not wait. Twice is harmless; ``init`` may follow.
    """
    _manager.close(abort=abort)
    _manager._device = None
