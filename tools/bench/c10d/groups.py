"""Two process groups over the same ranks: one of the backend "commlib", one of torch's own."""

import torch.distributed as dist

from commlib import CommContext
from commlib.compat.c10d.group_calls import NAME

__all__ = ["NAME", "OURS", "STOCK", "both_groups", "stock_backend"]

OURS, STOCK = 'backend "commlib"', "torch's own backend"


def both_groups(ring: CommContext) -> dict[str, dist.ProcessGroup]:
    """Return the group of a ring, and the default group of a stock backend."""
    world = dist.group.WORLD
    assert world is not None
    return {OURS: ring.process_group(), STOCK: world}


def stock_backend(backend: str) -> dict[str, str]:
    """Return words of a caption: the stock backend's name and the ranks' devices."""
    on_gpus = backend == "nccl"
    return {"stock": "NCCL" if on_gpus else "gloo", "place": "GPUs" if on_gpus else "CPUs"}
