"""number_count: how many tokens go to each expert."""

import torch

from commlib.ops.expert_parallel.expert_ids import check_ids, check_number


def number_count(numbers: torch.Tensor, upper_range: int) -> torch.Tensor:
    """Return how often each of 0 … ``upper_range`` - 1 stands in ``numbers``: int64 [upper_range].

    ``numbers``: expert ids of any shape, int32 or int64; ids outside the range (-1 for a dropped
    token) do not count. No communication, no host synchronisation. Raises ``ArgumentError``.
    Source: operator ``number_count``.
    """
    check_ids("number_count", "numbers", numbers, None)
    check_number("number_count", "upper_range", upper_range, 1)
    flat = numbers.reshape(-1).long()
    known = (flat >= 0) & (flat < upper_range)
    counts = torch.zeros(upper_range, dtype=torch.int64, device=numbers.device)
    return counts.index_add_(0, flat.masked_fill(~known, 0), known.long())
