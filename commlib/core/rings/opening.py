"""The rings of a program: found with the other ranks, created and closed."""

from collections.abc import Iterable

import torch

from commlib.core.context import CommContext
from commlib.core.devices import check_backend, checked_device, default_device
from commlib.core.manager import CommContextManager
from commlib.core.membership import Seconds, checked_members, same_ring
from commlib.errors import DeviceError


def init(
    backend: str | None = None,
    *,
    device: torch.device | str | None = None,
    timeout: Seconds | None = None,
) -> CommContext:
    """Find the other ranks and return ring 0, which holds all of them.

    Reads the environment of torchrun, Paddle, Slurm or mpirun, or joins an initialised
    ``torch.distributed``; without any of them the ring has size 1. Makes the GPU the current one.
    Blocks until all ranks have called it. A second call returns the same ring.

    Args:
        backend: "nccl" (GPUs) or "gloo" (CPUs). Default: a GPU wherever one is visible.
        device: This rank's GPU. Default: the GPU of the local rank.
        timeout: Seconds until missing ranks are an error, and of later waits on a CPU. Default:
            FLAGS_comm_timeout_s.

    Returns:
        Ring 0, on the device.

    Raises:
        BootstrapError: The environment or the store can't be used.
        DeviceError: There is no such GPU, or the backend does not run on the device.
        RingError: Ring 0 exists with another device or timeout, or it has failed.
        CommTimeout: Ranks are missing; the text names them.
    """
    check_backend(backend)
    manager = CommContextManager.instance()
    with manager._lock:
        existing = manager._table.usable(0)
    if existing is not None:
        ranks = existing.ranks
        return same_ring(existing, ranks, backend=backend, device=device, timeout=timeout)
    world = manager._world()
    ring_device = default_device(world, backend) if device is None else checked_device(device)
    if backend is not None and (backend == "nccl") != (ring_device.type == "cuda"):
        raise DeviceError(
            f"backend={backend!r} with device {ring_device}: nccl runs on GPUs, gloo on CPUs"
        )
    if ring_device.type == "cuda":
        torch.cuda.set_device(ring_device)
    ring = manager.create(0, range(world.size), device=ring_device, timeout=timeout)
    manager._device = ring_device
    return ring


def new_ring(
    ring_id: int, ranks: Iterable[int], *, timeout: Seconds | None = None, name: str = ""
) -> CommContext | None:
    """Create a ring of some ranks and return it; other ranks get None at once.

    Blocks the members until all have called it, at most ``timeout`` seconds.

    Args:
        ring_id: A whole number >= 0.
        ranks: Global ranks in the order of the ring.
        timeout: As in ``CommContextManager.create``, which also lists the exceptions.
        name: The program's own name of the ring, for ``commlib.comm(name)`` and messages.

    Returns:
        The ring, or None on a rank that is not a member.
    """
    manager = CommContextManager.instance()
    world = manager._world()
    members = checked_members(ring_id, ranks, world)
    if world.rank not in members:
        manager._table.elsewhere[ring_id] = members
        return None
    return manager.create(ring_id, members, timeout=timeout, name=name)


def close_ring(ring_id: int | str | CommContext, *, abort: bool = False) -> None:
    """Close one ring on this rank; a ring that is closed already is not an error.

    Args:
        ring_id: Its id, its name or the ring.
        abort: Wait for no call. Returns within 5 s, whatever other threads do.

    Raises:
        RingError: The ring never existed.
    """
    CommContextManager.instance().close(ring_id, abort)


def shutdown(*, abort: bool = False) -> None:
    """Close every ring in reverse order of creation and let the flags change again.

    Blocks until the calls that are under way have ended, at most FLAGS_comm_close_timeout_s seconds
    per ring. Twice is harmless; ``init`` may follow.

    Args:
        abort: Wait for no call. Returns within 5 s, whatever other threads do.
    """
    manager = CommContextManager.instance()
    manager.close(abort=abort)
    manager._device = None
