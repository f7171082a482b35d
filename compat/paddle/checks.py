"""Checks of the legacy operators, made on this rank before anything is launched."""

from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.manager import comm
from commlib.errors import ArgumentError, PeerError, RingError, ShapeError


def ring_of(name: str, ring_id: int) -> CommContext:
    """Return the ring of an operator; raises ``RingError``."""
    if isinstance(ring_id, int) and ring_id < 0:
        raise RingError(f"{name}: ring_id={ring_id}; expected the number of a ring, 0 or above")
    return comm(ring_id)


def ring_of_size(name: str, ring_id: int, nranks: int | None) -> CommContext:
    """Return the ring of an operator that takes its size; raises for another size."""
    ring = ring_of(name, ring_id)
    if nranks is None or nranks != ring.size:
        given = "nranks is missing" if nranks is None else f"nranks={nranks}"
        raise ArgumentError(
            f"{ring._describe(name)}: {given}; expected the size of the ring; pass "
            f"nranks={ring.size}"
        )
    return ring


def ring_of_rank(name: str, ring_id: int, nranks: int, rank: int) -> CommContext:
    """Return the ring of an operator that takes its size and this rank; raises for others."""
    ring = ring_of_size(name, ring_id, nranks)
    if rank != ring.rank:
        raise ArgumentError(
            f"{ring._describe(name)}: rank={rank}; expected this rank's position in the ring; "
            f"pass rank={ring.rank}"
        )
    return ring


def position(name: str, ring: CommContext, role: str, value: int) -> int:
    """Return a root or peer that is a position in the ring; raises ``PeerError`` for another."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < ring.size:
        raise PeerError(
            f"{ring._describe(name)}: {role}={value!r}; expected a position in the ring, 0 to "
            f"{ring.size - 1} (its global ranks are {list(ring.ranks)}); pass {role}=0"
        )
    return value


def tensor(name: str, ring: CommContext, x: Any) -> torch.Tensor:
    """Return ``x`` if it is a tensor; raises ``ArgumentError``."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(
            f"{ring._describe(name)}: x is {type(x).__name__}; expected a torch.Tensor"
        )
    return x


def tensor_with_rows(name: str, ring: CommContext, x: Any) -> torch.Tensor:
    """Return ``x`` if it is a tensor with a dim 0; raises ``ArgumentError`` or ``ShapeError``."""
    checked = tensor(name, ring, x)
    if checked.dim() == 0:
        raise ShapeError(f"{ring._describe(name)}: x is 0-D; expected a dim 0; pass x.view(1)")
    return checked


def detached(x: Any) -> Any:
    """Return ``x`` outside autograd: most legacy operators have no gradient."""
    return x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x
