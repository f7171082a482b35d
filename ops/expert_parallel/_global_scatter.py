"""global_scatter: every rank's rows go to the experts that they are meant for."""

import torch

from commlib.ops.expert_parallel.row_counts import move, register_move, row_table
from commlib.ops.registered.library import needs_op


def global_scatter(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int = 0,
    *,
    use_calc_stream: bool = True,
) -> torch.Tensor:
    """Return the rows that all ranks have for this rank's experts, by expert, then by sender.

    ``x``: [rows, width] of any dtype, ordered by receiving rank, then expert. ``local_count``:
    int64 [experts * size], on the CPU or the ring's device: ``local_count[k + j * experts]`` rows
    go to expert k of rank j. ``global_count``: as many, ``global_count[k + j * experts]`` rows come
    from rank j for expert k. Result: [sum(global_count), width]. Gradient: ``global_gather``. The
    ranks compare their counts first, host to host: it blocks the host, and counts on a GPU are
    waited for. Under capture the counts must be on the CPU and become a part of the graph. Runs on
    the caller's current stream; ``use_calc_stream=False`` on the ring's. Raises ``ArgumentError``
    (or a kind of it) on every rank for counts that do not match, naming the two ranks; nothing is
    launched then. Source: operator ``global_scatter``.
    """
    counts = row_table(x, local_count, global_count, ring_id, back=False)
    if needs_op(x) or x.requires_grad:
        moved: torch.Tensor = _registered_op(x, counts, ring_id, use_calc_stream, None)
        return moved
    return move(x, counts, ring_id, use_calc_stream, back=False)


_registered_op = register_move(back=False)
