"""Programs of two ranks, started by torchrun."""

import torch

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
_ON_ONE_GPU = ("-m", "tests.programs.on_one_gpu")


def on_gpus(*program: str) -> tuple[str, ...]:
    """Return the arguments of ``python`` that run ``program`` on two GPUs, or on the only one."""
    shared = _ON_ONE_GPU if torch.cuda.device_count() == 1 else ()
    return (*_TORCHRUN, "--nproc-per-node", "2", *shared, *program)
