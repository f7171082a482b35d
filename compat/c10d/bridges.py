"""From a process group to its ring, and from a ring to its process group."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from commlib.compat.c10d import group_rings
from commlib.compat.c10d.process_group import NAME, ProcessGroup
from commlib.core.context import CommContext
from commlib.core.manager import CommContextManager
from commlib.errors import ArgumentError
from commlib.rendezvous import environment


def ring_from_group(group: Any = None, *, device: torch.device | str | None = None) -> CommContext:
    """Return the ring of a process group or of one dimension of a ``DeviceMesh``.

    For a group of the backend "commlib" it is the ring that the group's own calls use. For a group
    of another backend it is a ring over the same ranks, which is made when there is none yet: then
    every member calls this, and it blocks until all have.

    Args:
        group: A process group, or a mesh of one dimension such as ``mesh["tp"]``. Default: the
            group of all ranks.
        device: The device of the ring's tensors. Default: a GPU where the group has one.

    Raises:
        ArgumentError: ``group`` is neither, or this rank is not a member.
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
    if not isinstance(group, ProcessGroup):
        group = _companion(group)
    kind = group._main.device.type if device is None else torch.device(device).type
    ring: CommContext = group._get_backend(torch.device(kind)).rings[kind]
    return ring


_companions: dict[dist.ProcessGroup, ProcessGroup] = {}  # of groups of other backends


def _companion(group: dist.ProcessGroup) -> ProcessGroup:
    """Return a group of ours over the ranks of another backend's group."""
    known = _companions.get(group)
    if known is not None and known._main._health.fault is None:
        return known
    world = environment.joined(dist.get_rank(), dist.get_world_size())
    ranks = tuple(dist.get_process_group_ranks(group))
    store = dist.PrefixStore("commlib", distributed_c10d._world.pg_map[group][1])
    timeout = dist.constants.default_pg_timeout
    rings = group_rings.make_rings(group.group_name, ranks, world, store, timeout)
    made = _companions[group] = ProcessGroup(rings, store, world, timeout)
    return made


def process_group_of(ring: CommContext) -> ProcessGroup:
    """Return the process group of a ring, for ``DDP(process_group=...)`` and the like.

    The same object at every call. No member waits for another one.

    Raises:
        ArgumentError: ``torch.distributed`` is not initialised.
    """
    if not dist.is_initialized():
        raise ArgumentError(
            f"{ring._describe('process_group')}: torch.distributed is not initialised, and it "
            f'keeps the list of groups; call dist.init_process_group("commlib") on every rank '
            f"first, which takes ring 0 over"
        )
    for known in distributed_c10d._world.pg_map:
        if isinstance(known, ProcessGroup) and any(ring is one for one in known.rings.values()):
            return known
    world = CommContextManager.instance().world()
    group = ProcessGroup({ring.device.type: ring}, None, world, timedelta(seconds=ring.timeout))
    name = f"commlib ring {ring.ring_id}"
    group.setGroupName(name)
    group.setGroupDesc(ring.name or "undefined")
    _enter(group, name, ring)
    return group


def _enter(group: ProcessGroup, name: str, ring: CommContext) -> None:
    """Enter a group in the tables in which ``torch.distributed`` looks groups up."""
    world: Any = distributed_c10d._world
    store = distributed_c10d._get_default_store()
    world.pg_map[group] = (dist.Backend(NAME), store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(ring.ranks)}
    world.pg_backend_config[group] = f"{ring.device.type}:{NAME}"
    tag = f"ptd:{name}"
    world.pg_to_tag[group] = tag
    for key in ("", tag):
        world.tags_to_pg.setdefault(key, []).append(group)
    distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]
