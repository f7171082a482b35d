"""NCCL with symmetric windows: memory that its communicator of torch has registered."""

from typing import Any, cast

import torch
import torch.distributed as dist

from commlib.tools.bench.peers.way import DTYPE, Way

NCCL_WINDOWS = "NCCL, symmetric windows"


class NcclWindows:
    """A window of one rank, registered together with the others.

    Fails where this torch or its NCCL has no such windows.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        """Register ``most`` bytes."""
        dist.all_reduce(torch.zeros(1, device=device))  # makes the communicator
        assert dist.group.WORLD is not None
        self._backend = cast(Any, dist.group.WORLD._get_backend(device))
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self._window = torch.zeros(most // DTYPE.itemsize, dtype=DTYPE, device=device)
        torch.cuda.synchronize(device)
        self._backend.register_mem_pool(self._pool, symm=True)

    def sums(self, shape: tuple[int, ...]) -> dict[str, Way]:
        """Return the way to add up tensors of ``shape``, in place."""
        x = self._window[: torch.Size(shape).numel()].view(shape)
        return {NCCL_WINDOWS: Way(x, lambda: (dist.all_reduce(x), x)[1])}

    def close(self) -> None:
        """Release the window, while the communicator is still there."""
        self._backend.deregister_mem_pool(self._pool)
