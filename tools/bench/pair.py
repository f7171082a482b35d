"""Ring 0 next to a torch.distributed group of the same ranks, in the same processes."""

import time
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


def slowest_seconds(ring: CommContext, call: Callable[[], object], calls: int) -> float:
    """Return the seconds of one of ``calls`` calls on the slowest rank, after a common start.

    One call that is not timed comes first.
    """
    settle = settler(ring)
    call()
    settle()
    ring.barrier()
    settle()
    began = time.perf_counter_ns()
    for _ in range(calls):
        call()
    settle()
    taken = time.perf_counter_ns() - began
    return max(each for (each,) in ring.exchange([taken])) / 1e9 / calls


@contextmanager
def ring_and_group(backend: str, group: str | None = None) -> Iterator[CommContext]:
    """Give ring 0 on ``backend`` ("nccl" or "gloo"); ``dist`` calls use the same ranks.

    ``group``: the backend of ``dist`` if it is another one.
    """
    ring = commlib.init(backend, timeout=TIMEOUT)  # first: it makes this rank's GPU the current one
    dist.init_process_group(group or backend, timeout=TIMEOUT)
    yield ring
    dist.destroy_process_group()
    commlib.shutdown()
