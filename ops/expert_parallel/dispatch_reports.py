"""Reports of a dispatch in the plain form: experts without room."""

import torch

from commlib.core.device_reports import capacity_error
from commlib.errors import CapacityError
from commlib.p2p.experts.tables import Overflow, local_experts
from commlib.rendezvous.identity import RingIdentity


def overflow_of(every: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return the report of the first expert without enough rows.

    Args:
        every: int64 [size, num_experts], every rank's choices of each expert.
        capacity: Rows of an expert.

    Returns:
        int64: 1 or 0, the expert, its rank, the capacity, each rank's choices of it.
    """
    over = (every.sum(0) > capacity).long()
    expert = over.argmax(0, keepdim=True)
    owner = expert // local_experts(every.shape[1], len(every))
    numbers = over.amax(0, keepdim=True), expert, owner, torch.full_like(expert, capacity)
    return torch.cat([*numbers, every.index_select(1, expert).view(-1)])


def describe_overflow(identity: RingIdentity, numbers: list[int]) -> CapacityError:
    """Return the error of a report."""
    expert, owner, capacity, *by_rank = numbers
    return capacity_error(identity, Overflow(expert, owner, capacity, tuple(by_rank)))
