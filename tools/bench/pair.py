"""Ring 0 next to a torch.distributed group of the same ranks, in the same processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec

import torch
import torch.distributed as dist

import commlib
from commlib import CommContext

TIMEOUT = timedelta(seconds=60)


def backend_for(nproc: int) -> str:
    """Return "nccl" where ``nproc`` ranks have a GPU each and CuPy is there, else "gloo"."""
    on_gpus = torch.cuda.device_count() >= nproc and find_spec("cupy") is not None
    return "nccl" if on_gpus else "gloo"


def settler(ring: CommContext) -> Callable[[], object]:
    """Return what waits until the calls of a ring have finished; on a CPU they have."""
    return torch.cuda.synchronize if ring.device.type == "cuda" else lambda: None


@contextmanager
def ring_and_group(backend: str) -> Iterator[CommContext]:
    """Give ring 0 on ``backend`` ("nccl" or "gloo"); ``dist`` calls use the same ranks."""
    ring = commlib.init(backend, timeout=TIMEOUT)  # first: it makes this rank's GPU the current one
    dist.init_process_group(backend, timeout=TIMEOUT)
    yield ring
    dist.destroy_process_group()
    commlib.shutdown()
