"""The ring that a caller describes: its id, ranks, device and timeout."""

import os
from collections.abc import Iterable
from datetime import timedelta
from operator import index

import torch

from commlib.core.context import CommContext
from commlib.core.devices import checked_device
from commlib.deadlines import Deadline
from commlib.errors import ArgumentError, RingError
from commlib.rendezvous.environment import World

Seconds = float | timedelta


def checked_members(ring_id: int, ranks: Iterable[int], world: World) -> tuple[int, ...]:
    """Return the global ranks of a ring; raises ``RingError`` for a wrong id or ranks."""
    if isinstance(ring_id, bool) or not isinstance(ring_id, int) or ring_id < 0:
        hint = f"; pass a name as name={ring_id!r}" if isinstance(ring_id, str) else ""
        raise RingError(f"ring_id={ring_id!r}: expected a whole number >= 0{hint}")
    members = _whole_numbers(ring_id, ranks, world)
    wrong = [rank for rank in members if not 0 <= rank < world.size]
    if not members or wrong or len(set(members)) != len(members):
        raise RingError(
            f"ring {ring_id} on rank {world.rank}: ranks={list(members)}; expected one or more "
            f"different global ranks from 0 to {world.size - 1}"
        )
    return members


def check_place(
    ring_id: int, members: tuple[int, ...], world: World, parent: tuple[int, World] | None
) -> None:
    """Refuse a rank that is not a member, and a forked child in the place of its parent.

    Args:
        ring_id: The ring.
        members: Its global ranks.
        world: This process's place among the ranks.
        parent: Id and place of the process that forked this one while it had rings.
    """
    if world.rank not in members:
        raise RingError(
            f"creating ring {ring_id} on rank {world.rank}: the ring's ranks are "
            f"{list(members)}; only members create it; call commlib.new_ring(...), which "
            f"returns None elsewhere"
        )
    if parent is None or len(members) == 1:
        return
    process, theirs = parent
    if (world.rank, world.address) == (theirs.rank, theirs.address):
        raise RingError(
            f"creating ring {ring_id}: rank {world.rank} of this rendezvous is process "
            f"{process}; this is its fork {os.getpid()}; set RANK, WORLD_SIZE, MASTER_ADDR "
            f"and MASTER_PORT of the child's own rendezvous first, or start the child with "
            f"spawn"
        )


def _whole_numbers(ring_id: int, ranks: Iterable[int], world: World) -> tuple[int, ...]:
    try:
        return tuple(index(rank) for rank in ranks)
    except TypeError:
        raise ArgumentError(
            f"ring {ring_id} on rank {world.rank}: ranks={ranks!r}; expected whole numbers from 0 "
            f"to {world.size - 1}; for example call commlib.new_ring({ring_id}, [0])"
        ) from None


def same_ring(
    known: CommContext,
    members: tuple[int, ...],
    *,
    backend: str | None = None,
    device: torch.device | str | None = None,
    timeout: Seconds | None = None,
) -> CommContext:
    """Return ``known`` if it is the ring that the caller describes, else raise ``RingError``."""
    if known.ranks != members:
        raise other_members(known.ring_id, "exists", known.ranks, members)
    differs = None
    if backend is not None and (backend == "nccl") != (known.device.type == "cuda"):
        differs = f"on {known.device}; given backend={backend!r}"
    elif device is not None and checked_device(device) != known.device:
        differs = f"on {known.device}; given {device}"
    elif timeout is not None and Deadline(timeout).seconds != known.timeout:
        differs = f"with timeout {known.timeout:g} s; given {Deadline(timeout).seconds:g} s"
    if differs:
        raise RingError(
            f"ring {known.ring_id} exists {differs}; leave the argument away to get the ring as "
            f"it is, or {known._identity.remedy}"
        )
    return known


def other_members(
    ring_id: int, state: str, ranks: tuple[int, ...], given: tuple[int, ...]
) -> RingError:
    """Return the error of a ring id that is in use for other ranks."""
    return RingError(
        f"ring {ring_id} {state} with ranks {list(ranks)}; given {list(given)}. Use another ring "
        f"id, or call commlib.close_ring({ring_id}) on its members first"
    )


def belongs(parent: int, process: int) -> str:
    """Say why a forked child can't use a ring of its parent."""
    return (
        f"belongs to process {parent}; this is its fork {process}; create rings in the child with "
        f"its own rendezvous, or start the child with spawn"
    )
