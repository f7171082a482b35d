"""Which device a rank's tensors lie on."""

import torch

from commlib._bootstrap import World
from commlib.errors import ArgumentError, DeviceError


def checked_device(device: torch.device | str) -> torch.device:
    """Return ``device`` with its index; raises ``DeviceError`` when it is not to be had."""
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"device={device!r}: expected 'cuda', 'cuda:N' or 'cpu'") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise DeviceError(f"device {device}: expected cuda or cpu")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None and count else device.index or 0
    if index >= count:
        raise DeviceError(f"device {device}: this process sees {count} GPUs; type device='cpu'")
    return torch.device("cuda", index)


def default_device(world: World, backend: str | None) -> torch.device:
    """The device of this rank: GPU LOCAL_RANK where every local rank has one, else the CPU."""
    if backend not in (None, "nccl", "gloo"):
        raise ArgumentError(f"backend={backend!r}: expected None, 'nccl' or 'gloo'")
    count = 0 if backend == "gloo" else torch.cuda.device_count()
    if backend == "nccl" and world.local_rank >= count:
        raise DeviceError(
            f"backend='nccl' on rank {world.rank}: local rank {world.local_rank} needs GPU number "
            f"{world.local_rank}, this process sees {count}; type device='cuda:0' for a process "
            f"that sees only its own, or backend='gloo'"
        )
    if world.local_size <= count:
        return torch.device("cuda", world.local_rank)
    return torch.device("cuda", world.local_rank) if backend == "nccl" else torch.device("cpu")
