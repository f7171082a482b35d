"""The legacy exchange of rows with the experts of all ranks."""

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring


def global_scatter(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = False,
) -> torch.Tensor:
    """Return the rows that all ranks have for this rank's experts, by expert, then by sender.

    ``x``: [rows, width]; the counts: int64 [experts * size]; the result is [sum(global_count),
    width]. The gradient is ``global_gather``. Always fenced, on the stream that ``use_calc_stream``
    chooses. Counts that do not match between ranks are an ``ArgumentError`` on all of them, where
    upstream hangs. Source: operator ``global_scatter``.
    """
    ring("global_scatter", ring_id)
    return ops.global_scatter(
        x, local_count, global_count, ring_id, use_calc_stream=use_calc_stream
    )


def global_gather(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = False,
) -> torch.Tensor:
    """Return this rank's own rows back from all experts, in the order before ``global_scatter``.

    ``x``: [sum(global_count), width]; the result is [sum(local_count), width]. The gradient is
    ``global_scatter``; all else as there. Source: operator ``global_gather``.
    """
    ring("global_gather", ring_id)
    return ops.global_gather(x, local_count, global_count, ring_id, use_calc_stream=use_calc_stream)
