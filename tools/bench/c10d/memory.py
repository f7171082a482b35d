"""The GPU memory of the programs of the benchmark `c10d`, in processes with one backend."""

import gc
import os

import torch
import torch.distributed as dist

import commlib
import commlib.compat.c10d  # registers the backend
from commlib.tools.bench.c10d.programs import DDP, FSDP, make_step
from commlib.tools.bench.pair import TIMEOUT

STEPS = 4


def measure(backend: str, kind: str = "cuda") -> dict[str, int]:
    """Return the bytes that each program has taken at its end, on the GPU where it is most.

    They include all that the process took since before its process group was made. ``kind`` is that
    of the ranks' devices; bytes are 0 on CPUs.
    """
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # the CUDA context, which every program has
    before = _free(device)
    dist.init_process_group(backend, timeout=TIMEOUT)
    usage = {program: _taken(program, device, before) for program in (DDP, FSDP)}
    dist.destroy_process_group()
    commlib.shutdown()
    return usage


def _taken(program: str, device: torch.device, before: int) -> int:
    assert dist.group.WORLD is not None
    step = make_step(program, dist.group.WORLD, device)
    for _ in range(STEPS):
        step()
    taken = torch.tensor([before - _free(device)], device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    del step
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next program begins with the communicator alone
    return int(taken)


def _free(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]
