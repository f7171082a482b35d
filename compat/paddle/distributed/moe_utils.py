"""The exchange of rows with the experts of a group: ``paddle.distributed.utils.moe_utils``."""

import torch

from commlib.compat.paddle import experts
from commlib.compat.paddle.distributed.groups import Group, member_ring

Tensor = torch.Tensor


def global_scatter(
    x: Tensor,
    local_count: Tensor,
    global_count: Tensor,
    group: Group | None = None,
    use_calc_stream: bool = True,
) -> Tensor | None:
    """Return the rows of all ranks for this rank's experts, by expert, then by sender.

    The arguments are those of ``compat.paddle.global_scatter``, with a group in place of a ring;
    ``use_calc_stream`` is True by default here.

    Args:
        x: [rows, width], this rank's rows by receiving rank, then expert.
        local_count: int64 [experts * size], rows that this rank sends to each expert.
        global_count: int64 [experts * size], rows that this rank's experts receive.
        group: Default: the group of all ranks. Other processes get None, with a warning.
        use_calc_stream: True runs on the current stream, False on the ring's comm stream.

    Returns:
        [sum(global_count), width], with a gradient.

    Raises:
        ArgumentError: The counts do not match each other or ``x``.
    """
    ring = member_ring("global_scatter", group)
    if ring is None:
        return None
    return experts.global_scatter(x, local_count, global_count, ring.ring_id, use_calc_stream)


def global_gather(
    x: Tensor,
    local_count: Tensor,
    global_count: Tensor,
    group: Group | None = None,
    use_calc_stream: bool = True,
) -> Tensor | None:
    """Return this rank's rows from all experts, in the order before ``global_scatter``.

    Args:
        x: [sum(global_count), width], the rows of this rank's experts.
        local_count, global_count, group, use_calc_stream: As in ``global_scatter``.

    Returns:
        [sum(local_count), width], with a gradient.

    Raises:
        ArgumentError: The counts do not match each other or ``x``.
    """
    ring = member_ring("global_gather", group)
    if ring is None:
        return None
    return experts.global_gather(x, local_count, global_count, ring.ring_id, use_calc_stream)
