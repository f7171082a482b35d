"""number_count: count the tokens of each expert."""

import torch

from commlib.ops.expert_parallel.ids import check_ids, check_number


def number_count(numbers: torch.Tensor, upper_range: int) -> torch.Tensor:
    """Count the tokens of each expert. There is no communication.

    Source: operator ``number_count``.

    Args:
        numbers: Expert ids of any shape, int32 or int64. Ids outside [0, upper_range), such as -1
            for a dropped token, are not counted.
        upper_range: Number of experts, at least 1.

    Returns:
        int64 [upper_range]. The host does not block.

    Raises:
        ArgumentError, DtypeError: An argument is invalid.
    """
    check_ids("number_count", "numbers", numbers, None)
    check_number("number_count", "upper_range", upper_range, 1)
    flat = numbers.reshape(-1).long()
    in_range = (flat >= 0) & (flat < upper_range)
    counts = torch.zeros(upper_range, dtype=torch.int64, device=numbers.device)
    return counts.index_add_(0, flat.masked_fill(~in_range, 0), in_range.long())
