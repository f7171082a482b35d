"""Our groups on torch before 2.14: a process group that is written in Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commlib.compat.c10d import group_rings
from commlib.compat.c10d.group_calls import GroupCalls
from commlib.core.calls.order import CallOrder
from commlib.core.compiler import untraced_methods
from commlib.core.context import CommContext
from commlib.errors import DeviceError
from commlib.rendezvous.world import World


@dataclass
class Options:
    """The settings of a group, as ``group._get_backend(device).options``."""

    _timeout: timedelta
    global_ranks_in_group: list[int]
    group_name: str = ""


@untraced_methods
class ProcessGroup(GroupCalls, dist.ProcessGroup):  # type: ignore[misc]  # overloads in torch
    """A process group over rings, in the place of the one that torch has made.

    ``dist.*`` calls its methods. It is its own backend.

    Args:
        rings: By type of device; the first one is that of a call without tensors.
        timeout: The longest wait on a CPU.
        store: The group's own store; None for a group that is made from a ring.
        world: This process's place among all ranks.
        orders: Its own orders of calls by type of device, where it has not the ring's.
        key: A name that is the same on every member.
    """

    supports_time_estimate = False

    def __init__(
        self,
        rings: dict[str, CommContext],
        timeout: timedelta,
        store: dist.Store | None,
        world: World,
        orders: dict[str, CallOrder] | None = None,
        key: str = "",
    ) -> None:
        self._set_up(rings, timeout, orders, key)
        dist.ProcessGroup.__init__(self, self._main.rank, self._main.size)  # type: ignore[call-arg]
        self._store, self._world = store, world
        self._name = self._desc = ""

    def __repr__(self) -> str:
        return f"<commlib group {self._name!r} of {[*self.rings.values()]}>"

    # -- identity ----------------------------------------------------------------------------------

    _get_backend_name = name = GroupCalls.getBackendName

    def getGroupName(self) -> str:
        """Return the group's name."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the group's name."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the group's description."""
        return self._desc

    def setGroupDesc(self, description: str) -> None:
        """Set the group's description."""
        self._desc = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc  # type: ignore[assignment]
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self.rings]

    @property
    def options(self) -> Options:
        """The group's settings."""
        return Options(self._timeout, list(self._main.ranks), self._name)

    def _get_backend(  # type: ignore[override]  # torch expects a C++ object
        self, device: torch.device
    ) -> "ProcessGroup":
        """Return the group: it is the backend of each of its devices."""
        if torch.device(device).type not in self.rings:
            raise DeviceError(f"{self!r}: no backend for {device}; it has {[*self.rings]}")
        return self

    def get_group_store(self) -> dist.Store:
        """Return the group's own store.

        Raises:
            NotImplementedError: The group was made from a ring, which has none for programs.
        """
        if self._store is None:
            raise NotImplementedError("a group of a ring has no store; call dist.new_group(ranks)")
        return self._store

    # -- what a backend has ------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.end_coalescing()

    def split_group(  # type: ignore[override]  # 2.11 names fewer arguments
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **others: Any,
    ) -> "ProcessGroup | None":
        """Return a group of some positions of this one; None on ranks that are not in it."""
        members, key = (
            tuple(self._main.ranks[position] for position in ranks),
            self.split_name(ranks),
        )
        if self._world.rank not in members:
            return None
        store = dist.PrefixStore(f"{key}/", self.get_group_store())
        wait = timeout or self._timeout
        remedy = group_rings.group_remedy()
        rings = group_rings.make_rings(key, members, self._world, store, wait, remedy)
        orders = group_rings.make_orders(rings, key, wait)
        group = ProcessGroup(rings, wait, store, self._world, orders, key)
        group.setGroupName(group_name or key)
        group.setGroupDesc(group_desc or "undefined")
        return group
