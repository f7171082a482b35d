"""Routing: which row of which expert each choice of a token becomes, in shapes that never vary."""

import torch

from commlib.ops.expert_parallel._number_count import number_count
from commlib.p2p.experts.tables import local_experts

Tensor = torch.Tensor


def places_in_groups(ids: Tensor) -> Tensor:
    """Return, for each id of the 1-D ``ids``, how many earlier ids are equal to it."""
    order = ids.argsort(stable=True)
    grouped = ids[order]
    # The index in the order minus the first index of the group.
    before = torch.arange(len(ids), device=ids.device) - torch.searchsorted(grouped, grouped)
    return torch.empty_like(before).scatter_(0, order, before)


class ChosenExperts:
    """The choices of this rank's tokens, before they know of the other ranks.

    Attributes:
        expert_ids: int32 [tokens, top_k]; -1 for an id outside [0, num_experts).
        owners: int64 [tokens, top_k], the rank of the expert; any rank for no expert.
        counts: int64 [num_experts], this rank's choices of each expert.
    """

    def __init__(self, ids: Tensor, num_experts: int, size: int, present: Tensor | None) -> None:
        """Note the choices; those of experts on ranks that are not ``present`` get no row."""
        self._local = local_experts(num_experts, size)
        wide = ids.long()
        chosen = (wide >= 0) & (wide < num_experts)
        self.expert_ids = torch.where(chosen, wide, -1).int()
        self.owners = torch.where(chosen, wide, 0) // self._local
        if present is not None:
            chosen = chosen & present[self.owners]
        self._ids = torch.where(chosen, wide, num_experts)
        self.counts = number_count(self._ids, num_experts)

    def positions(self, before: Tensor, capacity: int) -> Tensor:
        """Return the row of each choice on its owner: int32 [tokens, top_k], -1 for none.

        Args:
            before: int64 [num_experts], the rows of lower ranks for each expert.
            capacity: Rows of an expert; later choices are dropped.
        """
        none = before.new_full((1,), capacity)
        places = places_in_groups(self._ids.reshape(-1)).view(self._ids.shape)
        places = places + torch.cat([before, none])[self._ids]
        rows = (self._ids % self._local) * capacity + places
        return torch.where(places < capacity, rows, -1).int()


def links(positions: Tensor, owners: Tensor) -> Tensor:
    """Return the ``link`` of each choice: which rows on one rank belong to the same token.

    Bit 0 is set for the first choice of a token that its owner has a row for. The bits above are
    the row of the token's next choice there plus 1; 0 for none.
    """
    count, top_k = positions.shape
    used = positions >= 0
    together = used[:, :, None] & used[:, None] & (owners[:, :, None] == owners[:, None])
    step = torch.arange(top_k, device=positions.device)
    first = ~(together & (step[None] < step[:, None])).any(2)
    later = together & (step[None] > step[:, None])
    following = torch.where(later, step, top_k).amin(2)
    rows = torch.cat([positions + 1, positions.new_zeros(count, 1)], 1).gather(1, following)
    return (2 * rows + first).int()


def row_sources(every: Tensor, capacity: int) -> Tensor:
    """Return the rank that each row of this rank's experts is from; -1 for an unused row.

    Args:
        every: int64 [size, local experts], every rank's choices of each expert of this rank.
        capacity: Rows of an expert.

    Returns:
        int64 [local experts * capacity].
    """
    ends = every.cumsum(0)  # of each rank's rows
    places = torch.arange(capacity, device=every.device)
    sources = (ends[:, :, None] <= places).sum(0)
    return torch.where(sources < len(every), sources, -1).reshape(-1)
