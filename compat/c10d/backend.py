"""Our groups on torch 2.14 and newer: a backend that is written in Python."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from commlib.compat.c10d import group_rings
from commlib.compat.c10d.group_calls import NAME, GroupCalls
from commlib.core.calls.order import CallOrder
from commlib.core.compiler import untraced_methods
from commlib.core.context import CommContext
from commlib.rendezvous.world import World


@untraced_methods
class Backend(GroupCalls, c10d.Backend):
    """The backend of a torch process group, whose calls are those of rings.

    Torch's own group calls it, with its hooks and its flight recorder.

    Args:
        rings: By type of device; the first one is that of a call without tensors.
        timeout: The longest wait on a CPU.
        world: This process's place among all ranks.
        name: The name of the group.
        orders: Its own orders of calls by type of device, where it has not the ring's.
        key: A name that is the same on every member, if ``name`` is not.
    """

    def __init__(
        self,
        rings: dict[str, CommContext],
        timeout: timedelta,
        world: World,
        name: str,
        orders: dict[str, CallOrder] | None = None,
        key: str = "",
    ) -> None:
        self._set_up(rings, timeout, orders, key or name)
        c10d.Backend.__init__(self, self._main.rank, self._main.size)
        self._world, self._name = world, name

    @property
    def options(self) -> Any:
        """The group's settings: timeout, global ranks and name."""
        kind: Any = c10d.Backend.Options
        options = kind(NAME, timeout=self._timeout)
        options.global_ranks_in_group = list(self._main.ranks)
        options.group_name = self._name
        return options

    def split(self, store: dist.Store, ranks: Sequence[int], opts: Any) -> "Backend | None":
        """Return the backend of a group of some positions; None on ranks that are not in it."""
        members, key = (
            tuple(self._main.ranks[position] for position in ranks),
            self.split_name(ranks),
        )
        if self._world.rank not in members:
            return None
        wait = self._timeout if opts is None else opts._timeout
        remedy = group_rings.group_remedy()
        rings = group_rings.make_rings(key, members, self._world, store, wait, remedy)
        orders = group_rings.make_orders(rings, key, wait)
        name = getattr(opts, "group_name", "") or key
        return Backend(rings, wait, self._world, name, orders, key)


def takes_subclasses() -> bool:
    """Return True if this torch calls a backend that is written in Python."""

    class Probe(c10d.Backend):
        """A backend without calls."""

    try:
        Probe(0, 1)
    except TypeError:  # "No constructor defined"
        return False
    return True
