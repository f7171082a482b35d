"""The backend "commlib" of ``torch.distributed``: old programs on our rings.

``dist.init_process_group("commlib")`` makes groups whose collectives are those of rings. Importing
this module registers the backend; torch 2.14 and newer find it by an entry point of the package.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist

from commlib.compat.c10d import (
    barriers,
    batches,
    functional_ops,
    group_rings,
    joins,
    shrinking,
    splits,
)
from commlib.compat.c10d.backend import Backend, takes_subclasses
from commlib.compat.c10d.bridges import process_group_of, ring_from_group
from commlib.compat.c10d.group_calls import NAME
from commlib.compat.c10d.process_group import ProcessGroup
from commlib.rendezvous import environment

__all__ = ["process_group_of", "register", "ring_from_group"]


def __dir__() -> list[str]:
    """List the public names, without the modules that they are in."""
    return [*__all__]


def register() -> None:
    """Register the backend for CPUs and GPUs; a second call changes nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        batches.install()
        barriers.install()
        functional_ops.install()
        joins.install()
        splits.install()
        shrinking.install()


def _create(setup: Any, pg_options: Any = None) -> Any:
    """Return the group or the backend that torch asks for; every member calls this.

    Args:
        setup: Torch's description of the group: name, ranks, position, store, timeout.
        pg_options: Not read: rings are set by flags.
    """
    if dist.is_initialized():
        world = environment.joined(dist.get_rank(), dist.get_world_size())
    else:
        world = environment.joined(setup.group_rank, setup.group_size)
    ranks = tuple(setup.global_ranks_in_group) or tuple(range(setup.group_size))
    bound = _bound_device(setup)
    first = not dist.is_initialized()
    remedy = group_rings.group_remedy(first=first)
    arguments = (setup.group_id, ranks, world, setup.store, setup.timeout, remedy)
    rings = group_rings.make_rings(*arguments, bound=bound)
    orders = group_rings.make_orders(rings, setup.group_id, setup.timeout, first=first)
    if takes_subclasses():
        return Backend(rings, setup.timeout, world, setup.group_id, orders)
    group = ProcessGroup(rings, setup.timeout, setup.store, world, orders, setup.group_id)
    if bound is not None and bound.index is not None:
        group.bound_device_id = bound  # also that of the groups that are made from this one
    return group


def _bound_device(setup: Any) -> torch.device | None:
    """Return the ``device_id=`` of the group; None without one."""
    group: Any = getattr(setup, "process_group", None)
    if group is not None:
        bound: torch.device | None = group.bound_device_id
        return bound
    # torch before 2.14 passes it to no backend. The function of torch that makes the group has it.
    return sys._getframe(2).f_locals.get("device_id")


register()
