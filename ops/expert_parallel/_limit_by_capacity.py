"""limit_by_capacity: the tokens of each worker that fit an expert's capacity."""

import torch

from commlib.errors import ShapeError
from commlib.ops.expert_parallel.ids import check_ids, check_number


def limit_by_capacity(
    expert_count: torch.Tensor, capacity: torch.Tensor, n_worker: int
) -> torch.Tensor:
    """Limit the tokens per expert to its capacity. There is no communication.

    Workers are served in order. Source: operator ``limit_by_capacity``.

    Args:
        expert_count: [n_worker * experts], int32 or int64, the first worker's counts first.
        capacity: [experts], int32 or int64.
        n_worker: Number of workers, at least 1.

    Returns:
        The reduced counts, with the shape and dtype of ``expert_count``. The host does not block.

    Raises:
        ArgumentError, DtypeError, ShapeError: An argument is invalid.
    """
    check_ids("limit_by_capacity", "expert_count", expert_count)
    check_ids("limit_by_capacity", "capacity", capacity)
    check_number("limit_by_capacity", "n_worker", n_worker, 1)
    if expert_count.shape[0] != capacity.shape[0] * n_worker:
        raise ShapeError(
            f"limit_by_capacity: expert_count has {expert_count.shape[0]} entries; expected "
            f"n_worker={n_worker} times the {capacity.shape[0]} of capacity"
        )
    requested = expert_count.view(n_worker, capacity.shape[0])
    served_before = requested.cumsum(0) - requested
    remaining = (capacity.clamp(min=0) - served_before).clamp(min=0)
    return torch.minimum(requested, remaining).to(requested.dtype).reshape(-1)
