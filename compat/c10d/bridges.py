"""From a process group to its ring, and from a ring to its process group."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from commlib.compat.c10d import group_rings
from commlib.compat.c10d.backend import Backend, takes_subclasses
from commlib.compat.c10d.group_calls import NAME, GroupCalls
from commlib.compat.c10d.process_group import ProcessGroup
from commlib.core.context import CommContext
from commlib.core.manager import CommContextManager
from commlib.errors import ArgumentError, DeviceError
from commlib.rendezvous import environment
from commlib.rendezvous.identity import Remedy


def ring_from_group(group: Any = None, *, device: torch.device | str | None = None) -> CommContext:
    """Return the ring of a process group or of one dimension of a ``DeviceMesh``.

    For a group of the backend "commlib" it is the ring that the group's own calls use. For a group
    of another backend it is a ring over the same ranks, which is made when there is none yet: then
    every member calls this, and it blocks until all have.

    Args:
        group: A process group, or a mesh of one dimension such as ``mesh["tp"]``. Default: the
            group of all ranks.
        device: The device of the ring's tensors. Default: a GPU where the group has one.

    Returns:
        The ring.

    Raises:
        ArgumentError: ``group`` is neither, or this rank is not a member.
        DeviceError: The group has no ring on this kind of device.
        CommTimeout: Ranks are missing; the text names them.
    """
    if hasattr(group, "get_group"):
        group = group.get_group()
    group = distributed_c10d._get_default_group() if group is None else group
    if not isinstance(group, dist.ProcessGroup) or group not in distributed_c10d._world.pg_map:
        raise ArgumentError(
            f"ring_from_group: given {group!r}; expected a process group that this rank is in, or "
            f"one dimension of a DeviceMesh; call it on the members of the group alone"
        )
    calls = calls_of(group)
    rings = _rings_over(group) if calls is None else calls.rings
    if device is None:
        return next(iter(rings.values()))
    kind = torch.device(device).type
    if kind not in rings:
        raise DeviceError(
            f"ring_from_group(device={str(device)!r}): the group has rings on {[*rings]}"
        )
    return rings[kind]


def calls_of(group: dist.ProcessGroup) -> GroupCalls | None:
    """Return what carries a group's calls if it is ours, else None."""
    if isinstance(group, GroupCalls):
        return group
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        if isinstance(backend, GroupCalls):
            return backend
    return None


def _rings_over(group: dist.ProcessGroup) -> dict[str, CommContext]:
    """Return rings over the ranks of another backend's group; ``commlib.shutdown`` closes them."""
    world = environment.joined(dist.get_rank(), dist.get_world_size())
    ranks = tuple(dist.get_process_group_ranks(group))
    store = dist.PrefixStore("commlib", distributed_c10d._world.pg_map[group][1])
    timeout = dist.constants.default_pg_timeout
    remedy = Remedy("commlib.close_ring(ring)", "commlib.ring_from_group(group), on every member")
    return group_rings.make_rings(group.group_name, ranks, world, store, timeout, remedy)


def process_group_of(ring: CommContext) -> dist.ProcessGroup:
    """Return the process group of a ring, for ``DDP(process_group=...)`` and the like.

    No member waits for another one.

    Args:
        ring: A ring of this process.

    Returns:
        The same object at every call.

    Raises:
        ArgumentError: ``torch.distributed`` is not initialised.
    """
    if not dist.is_initialized():
        raise ArgumentError(
            f"{ring._describe('process_group')}: torch.distributed is not initialised, and it "
            f'keeps the list of groups; call dist.init_process_group("commlib") on every rank '
            f"first, which takes ring 0 over"
        )
    for process_group in distributed_c10d._world.pg_map:
        calls = calls_of(process_group)
        if calls is not None and any(ring is one for one in calls.rings.values()):
            return process_group
    name = f"commlib ring {ring.ring_id}"
    for process_group in [
        one for one, its in distributed_c10d._world.pg_names.items() if its == name
    ]:
        dist.destroy_process_group(process_group)  # of a closed ring that had the same id
    group: dist.ProcessGroup = _group_over(ring, name)
    _enter(group, name, ring)
    group_rings.hold(ring)
    return group


def _group_over(ring: CommContext, name: str) -> Any:
    world = CommContextManager.instance()._world()
    rings, timeout = {ring.device.type: ring}, timedelta(seconds=ring.timeout)
    group: Any
    if takes_subclasses():
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group = dist.ProcessGroup(distributed_c10d._get_default_store(), ring.rank, ring.size)
        group._set_default_backend(kind)
        group._register_backend(ring.device, kind, Backend(rings, timeout, world, name))
    else:
        group = ProcessGroup(rings, timeout, None, world, key=name)
    group._set_group_name(name)
    group._set_group_desc(ring.name or "undefined")
    return group


def _enter(group: dist.ProcessGroup, name: str, ring: CommContext) -> None:
    """Enter a group in the tables in which ``torch.distributed`` looks groups up."""
    distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]
    world: Any = distributed_c10d._world
    world.pg_map[group] = (dist.Backend(NAME), distributed_c10d._get_default_store())
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(ring.ranks)}
    world.pg_backend_config[group] = f"{ring.device.type}:{NAME}"
    tag = f"ptd:{name}"
    world.pg_to_tag[group] = tag
    for key in ("", tag):
        world.tags_to_pg.setdefault(key, []).append(group)
