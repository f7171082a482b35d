"""The device of a rank's tensors."""

from pathlib import Path

import torch

from commlib.errors import ArgumentError, DeviceError
from commlib.log import log
from commlib.rendezvous.environment import World

_DRIVER = Path("/proc/driver/nvidia/gpus")


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
        raise DeviceError(f"device {device}: this process sees {count} GPUs; pass device='cpu'")
    return torch.device("cuda", index)


def check_backend(backend: str | None) -> None:
    """Raise ``ArgumentError`` unless ``backend`` is None, "nccl" or "gloo"."""
    if backend not in (None, "nccl", "gloo"):
        raise ArgumentError(f"backend={backend!r}: expected None, 'nccl' or 'gloo'")


def default_device(world: World, backend: str | None) -> torch.device:
    """Choose the device of this rank.

    A GPU wherever one is visible: the only one, else the one of the local rank. Without a local
    rank it is the program's current GPU if that is not GPU 0, else global rank modulo the number
    of GPUs. The CPU is chosen with ``backend="gloo"``, where no GPU is visible, and, with a
    warning, where more local ranks than GPUs share a host.

    Args:
        world: The place of this rank.
        backend: "nccl" for a GPU, "gloo" for the CPU, None for the choice above.

    Raises:
        ArgumentError: The backend is unknown.
        DeviceError: There is no GPU for this local rank, or none at all for ``backend="nccl"``.
    """
    check_backend(backend)
    count = 0 if backend == "gloo" else torch.cuda.device_count()
    if count == 0:
        if backend == "nccl":
            raise DeviceError(
                f"backend='nccl' on rank {world.rank}: this process sees no GPU; "
                f"pass backend='gloo' on every rank"
            )
        return torch.device("cpu")
    if count == 1:
        return _only_gpu(world, backend)
    if world.local_rank is None:
        return _guessed_gpu(world, count)
    if backend is None and (world.local_size or 0) > count:
        return _shared_gpus(world, count)
    if world.local_rank >= count:
        raise DeviceError(
            f"rank {world.rank} has local rank {world.local_rank}, but this process sees {count} "
            f"GPUs; start at most one rank per GPU, or pass device= or backend='gloo' to "
            f"commlib.init"
        )
    return torch.device("cuda", world.local_rank)


def _only_gpu(world: World, backend: str | None) -> torch.device:
    """Return the one visible GPU, unless it is the host's only one and several ranks share it."""
    if (world.local_size or 1) > 1:
        if backend is None and _gpus_of_host() == 1:
            return _shared_gpus(world, 1)
        log.warning_once(
            "%d local ranks, and this process sees one GPU: it uses cuda:0, which is right if "
            "each rank sees its own GPU. If they share it, pass device='cpu' to commlib.init",
            world.local_size,
        )
    return torch.device("cuda", 0)


def _shared_gpus(world: World, count: int) -> torch.device:
    log.warning_once(
        "%d local ranks share %d %s: all of them use the CPU. Start at most one rank per GPU, or "
        "pass device= or backend='gloo' to commlib.init",
        world.local_size,
        count,
        "GPU" if count == 1 else "GPUs",
    )
    return torch.device("cpu")


def _gpus_of_host() -> int | None:
    """Return how many GPUs the driver has, hidden ones included; None if it does not say."""
    try:
        return len(list(_DRIVER.iterdir()))
    except OSError:
        return None


def _guessed_gpu(world: World, count: int) -> torch.device:
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    index = current or world.rank % count
    if world.size > 1:
        log.once(
            "the environment gives no local rank: rank %d uses cuda:%d, %s",
            world.rank,
            index,
            "the current GPU" if current else f"its rank modulo {count} GPUs",
        )
    return torch.device("cuda", index)
