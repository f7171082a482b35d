"""prune_gate_by_capacity: drop the tokens beyond their expert's count."""

import torch

from commlib.errors import ShapeError
from commlib.ops.expert_parallel.ids import check_ids, check_number
from commlib.ops.expert_parallel.routing import places_in_groups


def prune_gate_by_capacity(
    gate_idx: torch.Tensor, expert_count: torch.Tensor, n_expert: int, n_worker: int
) -> torch.Tensor:
    """Replace the expert id of tokens beyond the expert's count with -1.

    Earlier tokens go first. There is no communication. Source: operator
    ``prune_gate_by_capacity``.

    Args:
        gate_idx: Expert ids of any shape, int32 or int64. Ids outside [0, n_expert * n_worker) are
            kept.
        expert_count: [n_expert * n_worker], int32 or int64.
        n_expert: Experts per worker, at least 1.
        n_worker: Number of workers, at least 1.

    Returns:
        The ids, with the shape and dtype of ``gate_idx``. The host does not block.

    Raises:
        ArgumentError, DtypeError, ShapeError: An argument is invalid.
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
    in_range = (flat >= 0) & (flat < count)
    ids = torch.where(in_range, flat, count).long()
    position = places_in_groups(ids)
    limit = torch.cat([expert_count, expert_count.new_zeros(1)])[ids]
    return torch.where(in_range & (position >= limit), -1, flat).view(gate_idx.shape)
