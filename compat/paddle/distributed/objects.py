"""Collectives of Python objects, over the host exchange of a group's ring.

An object travels as ``torch.save`` writes it and is read with ``weights_only=True``: nothing that
another rank has sent is run as code. Tensors, numbers, text, bytes, lists, tuples, dicts and sets
of these need no more; other classes are named once per program with
``torch.serialization.add_safe_globals([Class])``, on every rank. GPU tensors are received on the
ring's GPU.
"""

import io
import pickle
from typing import Any

import torch

from commlib.compat.paddle.distributed.groups import Group, member_ring, position_of
from commlib.core.context import CommContext
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
    data = _encoded("all_gather_object", ring, obj)
    rows = ring._hosts.exchange_bytes(data)
    object_list += [_decoded(row, ring) for row in rows]


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
    data = _encoded(name, ring, object_list) if ring.rank == root else b""
    row = ring._hosts.exchange_bytes(data)[root]
    if ring.rank == root:
        return
    received = _decoded(row, ring)
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
    root, data = position_of(name, ring, "src", src), b""
    if ring.rank == root:
        if in_object_list is None or len(in_object_list) != ring.size:
            raise ArgumentError(
                f"{ring._describe(name)}: in_object_list={in_object_list!r}; expected a list of "
                f"{ring.size} objects, one per rank of the group"
            )
        data = _encoded(name, ring, in_object_list)
    row = ring._hosts.exchange_bytes(data)[root]
    out_object_list[:] = [_decoded(row, ring)[ring.rank]]


def _encoded(name: str, ring: CommContext, obj: object) -> bytes:
    """Return an object as bytes that ``_decoded`` can read on every rank.

    Raises:
        ArgumentError: It contains what only code can restore.
    """
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
        _decoded(buffer.getvalue(), ring)
    except Exception as error:  # pickle passes on whatever the object's own methods raise
        missing = "" if not isinstance(error, pickle.UnpicklingError) else _unknown(buffer)
        raise ArgumentError(
            f"{ring._describe(name)}: an object of type {type(obj).__name__} can't be carried: "
            f"{missing or error}"
        ) from error
    return buffer.getvalue()


def _unknown(buffer: io.BytesIO) -> str:
    """Name the classes that the program has not allowed, with the remedy."""
    buffer.seek(0)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    return (
        f"it contains {', '.join(names)}; pass plain values and tensors, or call "
        f"torch.serialization.add_safe_globals([...]) with these classes on every rank"
    )


def _decoded(data: bytes, ring: CommContext) -> Any:
    """Read an object; tensors of any GPU are put on the ring's device."""

    def placed(storage: Any, location: str) -> Any:
        target = location if location == "cpu" else str(ring.device)
        return torch.serialization.default_restore_location(storage, target)

    return torch.load(io.BytesIO(data), map_location=placed, weights_only=True)
