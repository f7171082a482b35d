"""random_routing: drop a token's second expert at random, by its weight."""

import torch

from commlib.errors import ShapeError
from commlib.ops.expert_parallel.ids import check_ids, check_readable


def random_routing(
    topk_idx: torch.Tensor, topk_value: torch.Tensor, prob: torch.Tensor
) -> torch.Tensor:
    """Drop a token's second expert at random, by its weight.

    The second expert becomes -1 where ``2 * topk_value[:, 1] < prob``. There is no communication.
    Source: operator ``random_routing``.

    Args:
        topk_idx: [tokens, 2], int32 or int64 expert ids.
        topk_value: [tokens, 2], their weights.
        prob: [tokens], drawn by the caller from [0, 1).

    Returns:
        The ids, with the shape and dtype of ``topk_idx``. The host does not block.

    Raises:
        ArgumentError, DtypeError, ShapeError: An argument is invalid.
    """
    check_ids("random_routing", "topk_idx", topk_idx, 2)
    check_readable("random_routing", "topk_value", topk_value)
    check_readable("random_routing", "prob", prob)
    rows = topk_idx.shape[0]
    shapes = tuple(topk_idx.shape), tuple(topk_value.shape), tuple(prob.shape)
    if shapes != ((rows, 2), (rows, 2), (rows,)):
        raise ShapeError(
            f"random_routing: topk_idx, topk_value and prob have shapes {shapes}; expected "
            f"[tokens, 2], [tokens, 2] and [tokens]"
        )
    first, second = topk_idx.unbind(1)
    return torch.stack([first, torch.where(2 * topk_value[:, 1] < prob, -1, second)], 1)
