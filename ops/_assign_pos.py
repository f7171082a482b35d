"""assign_pos: the tokens in the order of their experts."""

import torch

from commlib.errors import ArgumentError
from commlib.ops._expert_ids import check_ids, check_number


def assign_pos(
    x: torch.Tensor, cum_count: torch.Tensor, *, total: int | None = None
) -> torch.Tensor:
    """Return the positions in ``x`` grouped by expert: int64 [cum_count[-1]].

    ``x``: expert ids [tokens], int32 or int64; ids below 0 or without a count (dropped tokens) are
    left away. ``cum_count``: inclusive sums of ``number_count``. Positions of one expert ascend,
    where the legacy operator leaves their order open. ``total`` is cum_count[-1] where the program
    knows it; without it the host waits for that number. No communication. Raises
    ``ArgumentError``. Source: operator ``assign_pos``.
    """
    check_ids("assign_pos", "x", x)
    check_ids("assign_pos", "cum_count", cum_count)
    if total is None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "assign_pos: a capture can't read cum_count[-1]; type total=, the number of tokens "
                "that have an expert"
            )
        total = int(cum_count[-1]) if cum_count.numel() else 0
    check_number("assign_pos", "total", total, 0)
    dropped = (x < 0) | (x >= cum_count.shape[0])
    order = torch.where(dropped, cum_count.shape[0], x).argsort(stable=True)
    return order[:total]
