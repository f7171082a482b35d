"""Legacy process groups: a ``Group`` is a ring with a legacy number."""

import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta

from commlib.compat.paddle.checks import ring_of
from commlib.compat.paddle.distributed.process_group import ProcessGroup
from commlib.core.context import CommContext
from commlib.core.devices import check_backend, checked_device
from commlib.core.manager import CommContextManager, comm
from commlib.core.membership import checked_members
from commlib.core.rings.opening import close_ring, new_ring, shutdown
from commlib.errors import ArgumentError, PeerError, RingError

_FIRST_ID = 10  # upstream keeps 1 to 9 for its own rings
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}


class Group:
    """A ring as legacy programs see it; ``group.id`` is the ring's id.

    Attributes:
        rank: This process's position in the group, -1 if it is not a member.
        id: Number of the group and of its ring.
        ranks: Global ranks in the order of the group.
        name: Name of the group.
    """

    def __init__(
        self,
        rank_in_group: int,
        id: int,
        ranks: Iterable[int],
        pg: object = None,
        name: str | None = None,
    ) -> None:
        """Describe a group; ``new_group`` also creates its ring. ``pg`` is ignored."""
        self.rank, self.id, self.ranks, self.name = rank_in_group, id, list(ranks), name

    def __repr__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return (
            f"rank: {self.rank}, nranks: {self.nranks}, id: {self.id}, ranks: {ranks}; name: "
            f"{self.name}"
        )

    @property
    def nranks(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def world_size(self) -> int:
        """Number of members, -1 if this process is not one of them."""
        return self.nranks if self.rank >= 0 else -1

    @property
    def ring(self) -> CommContext:
        """The ring of the group; ``RingError`` if this process is not a member."""
        return comm(self.id)

    @property
    def process_group(self) -> ProcessGroup:
        """The ring with upstream's methods for slices; ``RingError`` as ``ring``."""
        return ProcessGroup(self.ring)

    @property
    def backend(self) -> str:
        """ "NCCL" for a group on GPUs, "GLOO" on CPUs; ``RingError`` as ``ring``."""
        return self.process_group.name()

    def is_member(self) -> bool:
        """Return True if this process is one of two or more members, as upstream does."""
        return self.rank >= 0 and self.nranks > 1

    def get_group_rank(self, rank: int) -> int:
        """Return the position of a global rank in the group, -1 if there is none."""
        return self.ranks.index(rank) if self.is_member() and rank in self.ranks else -1


class _Groups:
    """The groups of this process, and the number of the next one."""

    def __init__(self) -> None:
        self.by_id: dict[int, Group] = {}
        self.next_id = _FIRST_ID
        self.ends: list[Callable[[], None]] = []


_groups = _Groups()


def at_end(forget: Callable[[], None]) -> None:
    """Call ``forget`` whenever all groups are destroyed, for what is built on groups."""
    _groups.ends.append(forget)


def global_group() -> Group:
    """Return the group of all ranks, number 0.

    Raises:
        RingError: ``init_parallel_env`` was not called.
    """
    ring = ring_of("the global group", 0)
    return Group(ring.rank, 0, ring.ranks, name="_default_pg0")


def new_group(
    ranks: Iterable[int] | None = None,
    backend: str | None = None,
    timeout: float | timedelta | None = None,
) -> Group:
    """Create a group. All processes call it, in one order; its members alone wait for each other.

    The first group of a program has the number 10, the next one 11, as upstream's. The number is
    also the id of the group's ring.

    Args:
        ranks: Global ranks; the group has them in ascending order. Default: all.
        backend: "nccl" (GPUs) or "gloo" (CPUs). Default: the device of ring 0.
        timeout: As in ``commlib.new_ring``. Upstream's default is 30 minutes.

    Returns:
        The group, also on processes that are not members; their ``rank`` is -1.

    Raises:
        RingError: Ring 0 does not exist, or ``ranks`` is wrong.
        ArgumentError: ``backend`` is unknown.
        DeviceError: This process, a member or not, has no device for ``backend``.
        CommError: As ``CommContextManager.create``.
    """
    world_ring, manager = ring_of("new_group", 0), CommContextManager.instance()
    check_backend(backend)
    device = None if backend is None else checked_device(_DEVICES[backend])
    ring_id, world = _groups.next_id, manager._world()
    rank_list = world_ring.ranks if ranks is None else ranks
    members = sorted(checked_members(ring_id, rank_list, world))
    _groups.next_id += 1
    if world.rank in members:
        manager.create(ring_id, members, device=device, timeout=timeout)
    else:
        new_ring(ring_id, members)
    position = members.index(world.rank) if world.rank in members else -1
    group = Group(position, ring_id, members, name=f"_default_pg{ring_id}")
    _groups.by_id[ring_id] = group
    return group


def get_group(id: int = 0) -> Group | None:
    """Return a group by its number; warn and return None if there is none.

    Args:
        id: Number of the group; 0 is the group of all ranks.
    """
    if id == 0 and is_initialized():
        return global_group()
    if id not in _groups.by_id:
        warnings.warn(f"group {id} does not exist here; call new_group first", stacklevel=2)
    return _groups.by_id.get(id)


def is_initialized() -> bool:
    """Return True between ``init_parallel_env`` and ``destroy_process_group``."""
    return CommContextManager.instance().has(0)


def destroy_process_group(group: Group | None = None) -> None:
    """Close the ring of a group, or all rings.

    Args:
        group: Default: the group of all ranks, and with it every other one. Numbers start again,
            and the hybrid group and the tracked generator states are forgotten.

    Raises:
        RingError: The group was destroyed before.
    """
    if group is None or group.id == 0:
        ring_of("destroy_process_group", 0)
        _groups.by_id.clear()
        _groups.next_id = _FIRST_ID
        for forget in _groups.ends:
            forget()
        shutdown()
        return
    if _groups.by_id.pop(group.id, None) is None:
        raise RingError(
            f"destroy_process_group: group {group.id} does not exist on this rank; it has groups "
            f"{list(_groups.by_id)}; destroy a group once"
        )
    if group.rank >= 0:
        close_ring(group.id)


def get_backend(group: Group | None = None) -> str:
    """Return "NCCL" or "GLOO", for what the group's device runs on.

    Args:
        group: Default: the group of all ranks.

    Raises:
        RingError: This process is not a member of the group.
    """
    return (global_group() if group is None else group).backend


def member_ring(name: str, group: Group | None) -> CommContext | None:
    """Return the ring of a call, or warn and return None on a process that is not a member.

    Args:
        name: The legacy name, for messages.
        group: None is the group of all ranks.

    Raises:
        RingError: The ring does not exist.
        ArgumentError: ``group`` is not a ``Group``.
    """
    if group is None:
        return ring_of(name, 0)
    if not isinstance(group, Group):
        raise ArgumentError(
            f"{name}: group={group!r}; expected a Group; pass what new_group has returned, or None"
        )
    if group.rank < 0:
        warnings.warn(
            f"{name}: this rank is not in group {group.id} (ranks {group.ranks}); the call does "
            f"nothing",
            stacklevel=3,
        )
        return None
    return group.ring


def position_of(name: str, ring: CommContext, role: str, rank: int) -> int:
    """Return the position of a global rank in the ring.

    Raises:
        PeerError: It is not in the ring.
    """
    if rank not in ring.ranks or isinstance(rank, bool):
        raise PeerError(
            f"{ring._describe(name)}: {role}={rank!r}; expected a global rank of the group, one of "
            f"{list(ring.ranks)}; pass {role}={ring.ranks[0]}"
        )
    return ring.ranks.index(rank)
