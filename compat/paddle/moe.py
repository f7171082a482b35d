"""Legacy helpers of expert parallelism: counting, ordering and dropping tokens."""

import torch

from commlib import ops
from commlib.errors import ArgumentError
from commlib.ops import limit_by_capacity, prune_gate_by_capacity

__all__ = [
    "assign_pos",
    "limit_by_capacity",
    "number_count",
    "prune_gate_by_capacity",
    "random_routing",
]


def assign_pos(
    x: torch.Tensor,
    cum_count: torch.Tensor,
    eff_num_len: torch.Tensor | None = None,
    *,
    total: int | None = None,
) -> torch.Tensor:
    """Return the positions of tokens grouped by expert.

    Source: operator ``assign_pos``. It does not communicate.

    Args:
        x: Expert ids of any shape, int32 or int64. Ids below 0 are skipped.
        cum_count: Inclusive sums of ``number_count``.
        eff_num_len: Ignored: it is ``cum_count[-1]``.
        total: ``cum_count[-1]`` as a number. Without it the host waits for the number.

    Returns:
        int64 [cum_count[-1]], positions in the flattened ``x``.

    Raises:
        ArgumentError, DtypeError, ShapeError: As ``ops.assign_pos``.
    """
    return ops.assign_pos(x, cum_count, total=total)


def number_count(numbers: torch.Tensor, upper_range: int) -> torch.Tensor:
    """Return how often each of 0 to ``upper_range`` - 1 occurs in ``numbers``.

    Source: operator ``number_count``. Only int64 ids give counts that ``global_scatter`` accepts.

    Args:
        numbers: Integers of any shape.
        upper_range: Number of counts.

    Returns:
        [upper_range] in the dtype of ``numbers``.

    Raises:
        ArgumentError: As ``ops.number_count``.
    """
    return ops.number_count(numbers, upper_range).to(numbers.dtype)


def random_routing(
    topk_idx: torch.Tensor, topk_value: torch.Tensor, prob: torch.Tensor, topk: int = 2
) -> torch.Tensor:
    """Return ``topk_idx`` with -1 as second expert where ``2 * topk_value[:, 1] < prob``.

    Source: operator ``random_routing``.

    Args:
        topk_idx: [tokens, 2] ids of experts. It is not modified.
        topk_value: [tokens, 2] values of the gate.
        prob: [tokens] random numbers.
        topk: Must be 2.

    Returns:
        A copy of ``topk_idx`` with the dropped experts.

    Raises:
        ArgumentError: ``topk`` is not 2, or as ``ops.random_routing``.
    """
    if topk != 2:
        raise ArgumentError(f"random_routing: topk={topk!r}; expected 2, the only supported value")
    return ops.random_routing(topk_idx, topk_value, prob)
