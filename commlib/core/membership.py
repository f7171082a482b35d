"""The ring that a caller describes: its id, ranks, device and timeout."""

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
        raise RingError(f"ring_id={ring_id!r}: expected a whole number >= 0")
    members = _whole_numbers(ring_id, ranks, world)
    wrong = [rank for rank in members if not 0 <= rank < world.size]
    if not members or wrong or len(set(members)) != len(members):
        raise RingError(
            f"ring {ring_id} on rank {world.rank}: ranks={list(members)}; expected one or more "
            f"different global ranks from 0 to {world.size - 1}"
        )
    return members


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
    elif device is not None and checked_device(torch.device(device)) != known.device:
        differs = f"on {known.device}; given {device}"
    elif timeout is not None and Deadline(timeout).seconds != known.timeout:
        differs = f"with timeout {known.timeout:g} s; given {Deadline(timeout).seconds:g} s"
    if differs:
        raise RingError(
            f"ring {known.ring_id} exists {differs}; leave the argument away to get the ring as "
            f"it is, or {known._identity.recreate}"
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
