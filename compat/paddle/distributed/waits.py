"""Waits of the host: ``barrier`` and ``wait``."""

import torch

from commlib.compat.paddle import streams
from commlib.compat.paddle.distributed.groups import Group, member_ring


def barrier(group: Group | None = None) -> None:
    """Hold the host until every member of the group has called it.

    Args:
        group: Default: the group of all ranks. Other processes return at once, with a warning.

    Raises:
        CommTimeout: Ranks are missing at the timeout.
    """
    ring = member_ring("barrier", group)
    if ring is not None:
        streams.barrier(ring_id=ring.ring_id)


def wait(tensor: torch.Tensor, group: Group | None = None, use_calc_stream: bool = True) -> None:
    """Hold the host until a stream has finished its work. It does nothing on a CPU.

    Args:
        tensor: What the stream works on; all of the stream's work is waited for.
        group: Default: the group of all ranks. Other processes return at once, with a warning.
        use_calc_stream: True waits for the current stream, False for the group's comm stream.

    Raises:
        CommTimeout: The stream is still busy after the ring's timeout.
    """
    ring = member_ring("wait", group)
    if ring is None:
        return
    if use_calc_stream:
        streams.c_sync_calc_stream(tensor)
    else:
        streams.c_sync_comm_stream(tensor, ring.ring_id)
