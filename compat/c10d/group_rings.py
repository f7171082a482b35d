"""The rings of a process group: one per kind of device, shared by groups of the same ranks."""

import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from commlib.core.calls.order import CallOrder, open_order
from commlib.core.context import CommContext
from commlib.core.devices import checked_device, default_device
from commlib.core.manager import CommContextManager
from commlib.errors import CommError, DeviceError, RingError
from commlib.rendezvous.identity import Remedy
from commlib.rendezvous.world import World

# Ids of rings that groups make begin here; a program that numbers its own rings stays below.
_FIRST_ID = 1 << 20

_GROUPS_AGAIN = "then destroy the process groups that use the ring, and make them again"

# Groups per ring that a group has made. A ring that a program makes under the same id is another.
_users: WeakKeyDictionary[CommContext, int] = WeakKeyDictionary()


def group_remedy(*, first: bool = False) -> Remedy:
    """Return how a program makes a group again, with its rings.

    Args:
        first: True for the group of ``init_process_group``.
    """
    if first:
        return Remedy("dist.destroy_process_group()", "dist.init_process_group(...), on every rank")
    return Remedy(
        "dist.destroy_process_group(group) on its members",
        "dist.new_group(ranks) (or split_group, init_device_mesh) on the same ranks as before",
    )


def make_rings(
    name: str,
    ranks: tuple[int, ...],
    world: World,
    store: dist.Store,
    timeout: timedelta,
    remedy: Remedy,
    *,
    bound: torch.device | None = None,
) -> dict[str, CommContext]:
    """Return the rings of a new group; its members alone call it, and block for one another.

    A ring over the same ranks in the same order is used as it is, so a group never makes a second
    communicator for them. The group of all ranks is ring 0.

    Args:
        name: The group's name, the same on every member.
        ranks: Global ranks in the order of the group.
        world: This process's place among all ranks.
        store: A store of this group alone.
        timeout: Of the wait for missing ranks, and of later waits on a CPU.
        remedy: How the program makes the group again, for the error texts of new rings.
        bound: The device that the program names. Default: its current GPU if it has chosen one,
            else the one of the local rank.

    Returns:
        A ring per type of device: "cpu", and "cuda" where this rank has a GPU.

    Raises:
        DeviceError: There is no such device, or a ring of these ranks is on another GPU.
        RingError: The rings of this process are for other ranks.
        CommTimeout: Ranks are missing; the text names them.
    """
    world = _same_world(world)
    cpu = torch.device("cpu")
    main = _default_device(world) if bound is None else _checked(name, ranks, bound)
    rings: dict[str, CommContext] = {}
    try:
        for device in dict.fromkeys((main, cpu)):
            ring = ring_over(ranks, device)
            if ring is None:
                ring_id = _ring_id(name, device, device == main and len(ranks) == world.size)
                substore = dist.PrefixStore(f"commlib/{device.type}", store)
                ring = _create(ring_id, name, ranks, substore, device, timeout, world, remedy)
                _users[ring] = 0
            rings[device.type] = ring
            hold(ring)
    except BaseException:
        release(rings)
        raise
    return rings


def make_orders(
    rings: dict[str, CommContext],
    name: str,
    timeout: timedelta,
    *,
    first: bool = False,
) -> dict[str, CallOrder]:
    """Return the new group's own orders of calls, by type of device; its members alone call it.

    A group that has made its ring has the ring's own order, and so has the group of
    ``init_process_group``. Later groups of the same ranks have one each: torch's groups share none.

    Args:
        rings: The group's, from ``make_rings``; released if this fails.
        name: The group's name, the same on every member.
        timeout: Of the wait for missing ranks.
        first: True for the group of ``init_process_group``.

    Raises:
        CommTimeout: Ranks are missing; the text names them.
    """
    orders: dict[str, CallOrder] = {}
    try:
        for kind, ring in rings.items():
            if first or _users.get(ring) == 1:
                continue
            seconds = ring.timeout if _is_default(timeout) else timeout.total_seconds()
            order = open_order(ring, name, seconds)
            if order is not None:
                orders[kind] = order
    except BaseException:
        release(rings, orders)
        raise
    return orders


def _is_default(timeout: timedelta) -> bool:
    """Return True for torch's default, which means that the program gives none."""
    return timeout == dist.constants.default_pg_timeout


def _create(
    ring_id: int,
    name: str,
    ranks: tuple[int, ...],
    store: dist.Store,
    device: torch.device,
    timeout: timedelta,
    world: World,
    remedy: Remedy,
) -> CommContext:
    """Create the ring of a group; the errors name the group too, which the program knows."""
    limit = None if _is_default(timeout) else timeout
    try:
        return CommContextManager.instance().create(
            ring_id,
            ranks,
            store=store,
            device=device,
            timeout=limit,
            world=world,
            remedy=remedy,
        )
    except CommError as error:
        raise type(error)(f"process group {name!r}: {error}") from error


def ring_over(ranks: tuple[int, ...], device: torch.device) -> CommContext | None:
    """Return the first usable ring of these ranks, in this order, on this device."""
    manager = CommContextManager.instance()
    for ring in map(manager.get, manager.rings()):
        if ring.ranks == ranks and ring.device == device and ring._health.fault is None:
            return ring
    return None


def hold(ring: CommContext) -> None:
    """Count one more group of a ring if a group has made it; rings of the program stay anyhow."""
    if ring in _users:
        _users[ring] += 1


def add_to_remedy(ring: CommContext) -> None:
    """Let the errors of a ring of the program say that its groups must be made again too.

    A group keeps the object: when the program makes the ring again, that is another object.
    """
    if ring not in _users:
        ring._identity.remedy.after = _GROUPS_AGAIN


def release(rings: dict[str, CommContext], orders: Mapping[str, CallOrder] | None = None) -> None:
    """Close orders of calls, and the rings of groups that no group uses any more."""
    with ExitStack() as ends:  # each of them, also where one before has failed
        for ring in reversed(list(rings.values())):
            ends.callback(_release, ring)
        for order in reversed(list((orders or {}).values())):
            ends.callback(order.close)


def _release(ring: CommContext) -> None:
    """Count one group less of a ring that a group has made, and close it after the last one."""
    if ring not in _users:
        return
    _users[ring] -= 1
    if not _users[ring]:
        del _users[ring]
        _close(ring, abort=False)


def abort(rings: dict[str, CommContext], orders: Mapping[str, CallOrder]) -> None:
    """End the calls in flight of a group, and later ones.

    A group with its own connections ends alone while others use its ring, and on a ring of the
    program. Else the ring is aborted, if a group has made it.
    """
    for kind, ring in rings.items():
        order = orders.get(kind)
        if order is not None and order.is_apart and _users.get(ring) != 1:
            order.abort()
            _release(ring)
        elif _users.pop(ring, None) is not None:
            _close(ring, abort=True)


def _close(ring: CommContext, *, abort: bool) -> None:
    """Close a ring unless the program has: its id may be that of another ring by now."""
    manager = CommContextManager.instance()
    if manager.has(ring.ring_id) and manager.get(ring.ring_id) is ring:
        manager.close(ring.ring_id, abort=abort)


def _default_device(world: World) -> torch.device:
    """Return the program's current GPU if it has chosen one, else the device of the local rank."""
    if torch.cuda.is_initialized() and torch.cuda.current_device():
        return torch.device("cuda", torch.cuda.current_device())
    return default_device(world, None)


def _checked(name: str, ranks: tuple[int, ...], bound: torch.device) -> torch.device:
    """Return the device of ``device_id=``; refuse one that the ranks' own ring is not on.

    Another member may name the device of that ring, and would wait for no new one.
    """
    device, manager = checked_device(bound), CommContextManager.instance()
    for ring in map(manager.get, manager.rings()):
        usable = ring.ranks == ranks and ring._health.fault is None
        if usable and ring.device.type == device.type and ring.device != device:
            raise DeviceError(
                f"process group {name!r} on rank {ring.rank}: device_id={device}, and ring "
                f"{ring.ring_id} of the same ranks is on {ring.device}; pass "
                f"device_id=torch.device('{ring.device}'), or call "
                f"commlib.close_ring({ring.ring_id}) on its members first"
            )
    return device


def _same_world(world: World) -> World:
    """Return the place that this process's rings have, which must be ``world``."""
    manager = CommContextManager.instance()
    if not manager.rings():
        return world
    joined = manager._world()
    if (joined.rank, joined.size) != (world.rank, world.size):
        raise RingError(
            f"init_process_group: rank {world.rank} of {world.size}, but the rings of this process "
            f"are for rank {joined.rank} of {joined.size}; give both the same ranks, or call "
            f"commlib.shutdown() first"
        )
    return joined


def _ring_id(name: str, device: torch.device, whole: bool) -> int:
    """Return the id of a new ring, which all members compute alike."""
    if whole and not CommContextManager.instance().has(0):
        return 0
    number = 2 * int(name) if name.isdecimal() else (1 << 32) + 2 * zlib.crc32(name.encode())
    return _FIRST_ID + number + (device.type == "cuda")
