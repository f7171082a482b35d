"""Legacy exchange of rows with the experts of all ranks."""

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring_of


def global_scatter(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    *,
    capacity: int | None = None,
) -> torch.Tensor:
    """Return the rows of all ranks for this rank's experts, by expert, then by sender.

    Source: operator ``global_scatter``. Its gradient is ``global_gather``. Counts that do not match
    between ranks are an error on every rank; upstream hangs.

    Args:
        x: [rows, width], this rank's rows by expert.
        local_count: int64 [experts * size], rows that this rank sends to each expert.
        global_count: int64 [experts * size], rows that this rank's experts receive.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False on the ring's comm stream. Both are
            fenced.
        capacity: As in ``ops.global_scatter``: rows of the result, with counts on the device, so
            that a graph can be replayed with other counts. Upstream lacks it.

    Returns:
        [sum(global_count), width]; with ``capacity``, [capacity, width].

    Raises:
        ArgumentError: The counts do not match each other or ``x``.
    """
    ring_of("global_scatter", ring_id)
    return ops.global_scatter(
        x, local_count, global_count, ring_id, capacity=capacity, use_calc_stream=use_calc_stream
    )


def global_gather(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    *,
    capacity: int | None = None,
) -> torch.Tensor:
    """Return this rank's rows from all experts, in the order before ``global_scatter``.

    Source: operator ``global_gather``. Its gradient is ``global_scatter``.

    Args:
        x: [sum(global_count), width], the rows of this rank's experts.
        local_count: As in ``global_scatter``.
        global_count: As in ``global_scatter``.
        ring_id: The ring.
        use_calc_stream: As in ``global_scatter``.
        capacity: As in ``ops.global_gather``: rows of the result. Upstream lacks it.

    Returns:
        [sum(local_count), width]; with ``capacity``, [capacity, width].

    Raises:
        ArgumentError: The counts do not match each other or ``x``.
    """
    ring_of("global_gather", ring_id)
    return ops.global_gather(
        x, local_count, global_count, ring_id, capacity=capacity, use_calc_stream=use_calc_stream
    )
