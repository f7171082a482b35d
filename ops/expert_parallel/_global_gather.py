"""global_gather: the rows of ``global_scatter`` come back from the experts."""

import torch

from commlib.ops.expert_parallel.row_counts import move, register_move, row_table
from commlib.ops.registered.library import needs_op


def global_gather(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int = 0,
    *,
    use_calc_stream: bool = True,
) -> torch.Tensor:
    """Return this rank's own rows, back from all experts, in the order before ``global_scatter``.

    ``x``: [sum(global_count), width] of any dtype, ordered by this rank's experts, then by the rank
    that the rows came from, as ``global_scatter`` returns them. The counts are the same two as
    there. Result: [sum(local_count), width], by rank, then expert. Gradient: ``global_scatter``.
    Streams, blocking, capture and errors as ``global_scatter``. Source: operator ``global_gather``.
    """
    counts = row_table(x, local_count, global_count, ring_id, back=True)
    if needs_op(x) or x.requires_grad:
        moved: torch.Tensor = _registered_op(x, counts, ring_id, use_calc_stream, None)
        return moved
    return move(x, counts, ring_id, use_calc_stream, back=True)


_registered_op = register_move(back=True)
