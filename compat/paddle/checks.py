"""What the legacy operators refuse on this rank before anything is launched."""

from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.manager import comm
from commlib.errors import ArgumentError, PeerError, RingError, ShapeError


def ring(name: str, ring_id: int) -> CommContext:
    """Return the ring of an operator; raises ``RingError``."""
    if isinstance(ring_id, int) and ring_id < 0:
        raise RingError(f"{name}: ring_id={ring_id}; expected the number of a ring, 0 or above")
    return comm(ring_id)


def sized(name: str, ring_id: int, nranks: int | None) -> CommContext:
    """Return the ring of an operator that is told its size; another size is refused."""
    context = ring(name, ring_id)
    if nranks is None or nranks != context.size:
        given = "nranks is missing" if nranks is None else f"nranks={nranks}"
        raise ArgumentError(
            f"{context._describe(name)}: {given}; expected the size of the ring; "
            f"type nranks={context.size}"
        )
    return context


def placed(name: str, ring_id: int, nranks: int, rank: int) -> CommContext:
    """Return the ring of an operator that is told its size and its rank in it."""
    context = sized(name, ring_id, nranks)
    if rank != context.rank:
        raise ArgumentError(
            f"{context._describe(name)}: rank={rank}; expected this rank's position in the ring; "
            f"type rank={context.rank}"
        )
    return context


def position(name: str, context: CommContext, role: str, given: int) -> int:
    """Return a root or peer that is a position in the ring; raises ``PeerError`` for another."""
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < context.size:
        raise PeerError(
            f"{context._describe(name)}: {role}={given!r}; expected a position in the ring, 0 to "
            f"{context.size - 1} (its global ranks are {list(context.ranks)}); type {role}=0"
        )
    return given


def tensor(name: str, context: CommContext, x: Any) -> torch.Tensor:
    """Return ``x`` if it is a tensor; raises ``ArgumentError``."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(
            f"{context._describe(name)}: x is {type(x).__name__}; expected a torch.Tensor"
        )
    return x


def has_rows(name: str, context: CommContext, x: Any) -> torch.Tensor:
    """Return ``x`` if it is a tensor with a dim 0; raises ``ArgumentError`` or ``ShapeError``."""
    given = tensor(name, context, x)
    if given.dim() == 0:
        raise ShapeError(f"{context._describe(name)}: x is 0-D; expected a dim 0; type x.view(1)")
    return given


def cut(x: Any) -> Any:
    """Return ``x`` outside autograd: most legacy operators have no gradient."""
    return x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x
