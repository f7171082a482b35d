"""prune_gate_by_capacity: drop the tokens that their expert has no room for."""

import torch

from commlib.errors import ShapeError
from commlib.ops.expert_parallel.expert_ids import check_ids, check_number


def prune_gate_by_capacity(
    gate_idx: torch.Tensor, expert_count: torch.Tensor, n_expert: int, n_worker: int
) -> torch.Tensor:
    """Return ``gate_idx`` with -1 for every token beyond the count of its expert.

    ``gate_idx``: any shape, ids from 0 to n_expert * n_worker - 1, others are left as they are;
    ``expert_count``: [n_expert * n_worker]; both int32 or int64. Earlier tokens go first. The
    result has the shape and dtype of ``gate_idx``. No communication, no host synchronisation.
    Raises ``ArgumentError``, ``ShapeError``. Source: operator ``prune_gate_by_capacity``.
    """
    check_ids("prune_gate_by_capacity", "gate_idx", gate_idx, None)
    check_ids("prune_gate_by_capacity", "expert_count", expert_count)
    check_number("prune_gate_by_capacity", "n_expert", n_expert, 1)
    check_number("prune_gate_by_capacity", "n_worker", n_worker, 1)
    count = n_expert * n_worker
    if expert_count.shape[0] != count:
        raise ShapeError(
            f"prune_gate_by_capacity: expert_count has {expert_count.shape[0]} entries; expected "
            f"n_expert * n_worker = {count}"
        )
    flat = gate_idx.reshape(-1)
    known = (flat >= 0) & (flat < count)
    ids = torch.where(known, flat, count).long()
    order = ids.argsort(stable=True)
    grouped = ids[order]
    # How many tokens of the same expert stand before each one: its place minus its group's first.
    before = torch.arange(len(ids), device=ids.device) - torch.searchsorted(grouped, grouped)
    place = torch.empty_like(before).scatter_(0, order, before)
    room = torch.cat([expert_count, expert_count.new_zeros(1)])[ids]
    return torch.where(known & (place >= room), -1, flat).view(gate_idx.shape)
