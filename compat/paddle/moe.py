"""The legacy helpers of expert parallelism: counting, ordering and dropping tokens."""

import torch

from commlib import ops
from commlib.errors import ArgumentError
from commlib.ops import assign_pos, limit_by_capacity, prune_gate_by_capacity

__all__ = [
    "assign_pos",
    "limit_by_capacity",
    "number_count",
    "prune_gate_by_capacity",
    "random_routing",
]


def number_count(numbers: torch.Tensor, upper_range: int) -> torch.Tensor:
    """Return how often each of 0 … ``upper_range`` - 1 stands in ``numbers``.

    As ``ops.number_count``, in the dtype of ``numbers``: ``global_scatter`` takes counts of int64
    ids alone. Source: operator ``number_count``.
    """
    return ops.number_count(numbers, upper_range).to(numbers.dtype)


def random_routing(
    topk_idx: torch.Tensor, topk_value: torch.Tensor, prob: torch.Tensor, topk: int = 2
) -> torch.Tensor:
    """Return ``topk_idx`` with -1 as second expert where ``2 * topk_value[:, 1] < prob``.

    As ``ops.random_routing``, which works on a copy too; ``topk`` other than 2 is an
    ``ArgumentError``. Source: operator ``random_routing``.
    """
    if topk != 2:
        raise ArgumentError(f"random_routing: topk={topk!r}; expected 2, the only form there is")
    return ops.random_routing(topk_idx, topk_value, prob)
