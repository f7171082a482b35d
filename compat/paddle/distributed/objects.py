"""Collectives of Python objects, each as one of a group's ring.

What another rank has sent is read as data, and nothing of it is run as code. Classes of the program
are named once with ``torch.serialization.add_safe_globals([Class])``, on every rank.
"""

from typing import Any

from commlib.compat.paddle.distributed.groups import Group, member_ring, position_of
from commlib.errors import ArgumentError


def all_gather_object(object_list: list[Any], obj: object, group: Group | None = None) -> None:
    """Append the ``obj`` of every rank to ``object_list``, in rank order.

    Blocks the host until every member has called it, at most the ring's timeout.

    Args:
        object_list: The output.
        obj: Any object that the module can carry.
        group: Default: the group of all ranks. Other processes return at once, with a warning.

    Raises:
        ArgumentError: ``obj`` can't be carried; nothing is sent.
        CommTimeout: Naming the members that are late.
    """
    ring = member_ring("all_gather_object", group)
    if ring is None:
        return
    object_list += ring.all_gather_object(obj)


def broadcast_object_list(object_list: list[Any], src: int, group: Group | None = None) -> None:
    """Replace the entries of ``object_list`` by those of ``src``.

    Blocks the host until every member has called it, at most the ring's timeout.

    Args:
        object_list: As many entries on every rank. Input on ``src``, output elsewhere.
        src: Global rank of the sender.
        group: Default: the group of all ranks. Other processes return at once, with a warning.

    Raises:
        PeerError: ``src`` is not in the group.
        ArgumentError: An entry can't be carried, and nothing is sent; or the list has another
            length than that of ``src``.
        CommTimeout: Naming the members that are late.
    """
    name = "broadcast_object_list"
    ring = member_ring(name, group)
    if ring is None:
        return
    root = position_of(name, ring, "src", src)
    received: Any = ring.broadcast_object(object_list, root=root)
    if len(received) != len(object_list):
        raise ArgumentError(
            f"{ring._describe(name)}: object_list has {len(object_list)} entries here and "
            f"{len(received)} on global rank {src}; pass lists of one length"
        )
    object_list[:] = received


def scatter_object_list(
    out_object_list: list[Any],
    in_object_list: list[Any] | None = None,
    src: int = 0,
    group: Group | None = None,
) -> None:
    """Replace ``out_object_list`` by this rank's entry of the list of ``src``.

    Every member receives the full list. Blocks the host until all have called it, at most the
    ring's timeout.

    Args:
        out_object_list: The output, a list of one entry afterwards.
        in_object_list: One object per rank of the group on ``src``; ignored elsewhere.
        src: Global rank of the sender.
        group: Default: the group of all ranks. Other processes return at once, with a warning.

    Raises:
        PeerError: ``src`` is not in the group.
        ArgumentError: The list of ``src`` is missing, has another length, or can't be carried;
            nothing is sent.
        CommTimeout: Naming the members that are late.
    """
    name = "scatter_object_list"
    ring = member_ring(name, group)
    if ring is None:
        return
    root = position_of(name, ring, "src", src)
    if ring.rank == root and (in_object_list is None or len(in_object_list) != ring.size):
        raise ArgumentError(
            f"{ring._describe(name)}: in_object_list={in_object_list!r}; expected a list of "
            f"{ring.size} objects, one per rank of the group"
        )
    out_object_list[:] = [ring.scatter_object(in_object_list, root=root)]
