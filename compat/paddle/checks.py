"""Checks of the legacy operators, made on this rank before anything is launched."""

import torch

from commlib.core.context import CommContext
from commlib.core.manager import comm
from commlib.errors import ArgumentError, PeerError, RingError, ShapeError


def ring_of(name: str, ring_id: int) -> CommContext:
    """Return the ring of an operator.

    Raises:
        RingError: The ring does not exist.
    """
    if isinstance(ring_id, bool) or (isinstance(ring_id, int) and ring_id < 0):
        raise RingError(f"{name}: ring_id={ring_id}; expected the number of a ring, 0 or above")
    return comm(ring_id)


def ring_of_size(name: str, ring_id: int, nranks: int | None) -> CommContext:
    """Return the ring of an operator that takes its size.

    Raises:
        RingError: The ring does not exist.
        ArgumentError: ``nranks`` differs from the ring's size.
    """
    ring = ring_of(name, ring_id)
    if nranks is None or nranks != ring.size:
        actual = "nranks is missing" if nranks is None else f"nranks={nranks}"
        raise ArgumentError(
            f"{ring._describe(name)}: {actual}; expected the size of the ring; pass "
            f"nranks={ring.size}"
        )
    return ring


def ring_of_rank(name: str, ring_id: int, nranks: int, rank: int) -> CommContext:
    """Return the ring of an operator that takes its size and this rank.

    Raises:
        RingError: The ring does not exist.
        ArgumentError: ``nranks`` or ``rank`` differs from the ring's.
    """
    ring = ring_of_size(name, ring_id, nranks)
    if rank != ring.rank:
        raise ArgumentError(
            f"{ring._describe(name)}: rank={rank}; expected this rank's position in the ring; "
            f"pass rank={ring.rank}"
        )
    return ring


def position(name: str, ring: CommContext, role: str, value: int) -> int:
    """Return ``value``, a root or peer, if it is a position in the ring.

    Raises:
        PeerError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < ring.size:
        raise PeerError(
            f"{ring._describe(name)}: {role}={value!r}; expected a position in the ring, 0 to "
            f"{ring.size - 1} (its global ranks are {list(ring.ranks)}); pass {role}=0"
        )
    return value


def tensor(name: str, ring: CommContext, x: object) -> torch.Tensor:
    """Return ``x`` if it is a tensor.

    Raises:
        ArgumentError: It is not.
    """
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(
            f"{ring._describe(name)}: x is {type(x).__name__}; expected a torch.Tensor"
        )
    return x


def tensor_with_rows(name: str, ring: CommContext, x: object) -> torch.Tensor:
    """Return ``x`` if it is a tensor with a dim 0.

    Raises:
        ArgumentError: It is not a tensor.
        ShapeError: It is 0-D.
    """
    checked = tensor(name, ring, x)
    if checked.dim() == 0:
        raise ShapeError(f"{ring._describe(name)}: x is 0-D; expected a dim 0; pass x.view(1)")
    return checked


def detached(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` outside autograd, since most legacy operators have no gradient.

    A value that is not a tensor is returned as it is, for the checks of the operator.
    """
    return x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x
