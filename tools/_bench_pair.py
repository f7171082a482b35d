"""Ring 0 next to a torch.distributed group of the same ranks, in the same processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

import commlib
from commlib import CommContext

TIMEOUT = timedelta(seconds=60)


@contextmanager
def ring_and_group(backend: str) -> Iterator[CommContext]:
    """Give ring 0 on ``backend`` ("nccl" or "gloo"); ``dist`` calls use the same ranks."""
    ring = commlib.init(backend, timeout=TIMEOUT)  # first: it makes this rank's GPU the current one
    dist.init_process_group(backend, timeout=TIMEOUT)
    yield ring
    dist.destroy_process_group()
    commlib.shutdown()
