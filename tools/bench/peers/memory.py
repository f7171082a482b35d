"""Memory that the kernels of a peer read and write on every rank."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from commlib import CommContext

Tensor = torch.Tensor


class PeerMemory(Protocol):
    """The facts about its rank that an adapter needs."""

    rank: int
    size: int
    device: torch.device
    processors: int

    def shared(self, nbytes: int) -> tuple[Tensor, list[int]]:
        """Return zeroed bytes of this rank, and where each rank's are mapped here.

        Every rank calls it with the same size; all bytes are zero when it returns.
        """

    def stream(self) -> int:
        """Return the address of the current stream."""

    def barrier(self) -> None:
        """Wait until every rank's device has finished what came before."""


class GpuMemory:
    """Memory of the GPUs of a ring, mapped by torch's symmetric memory without multicast."""

    def __init__(self, ring: CommContext) -> None:
        """Use the ranks of ``ring``, which are those of ``torch.distributed``."""
        self._ring, self._mapped = ring, list[Any]()
        self.rank, self.size, self.device = ring.rank, ring.size, ring.device
        self.processors = torch.cuda.get_device_properties(ring.device).multi_processor_count

    def shared(self, nbytes: int) -> tuple[Tensor, list[int]]:
        """Return zeroed bytes of this rank, and where each rank's are mapped here."""
        assert dist.group.WORLD is not None
        mine = symm_mem.empty(nbytes, dtype=torch.uint8, device=self.device)
        handle = symm_mem.rendezvous(mine, dist.group.WORLD.group_name)
        views = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(self.size)]
        self._mapped.append((mine, handle, views))
        mine.zero_()
        self.barrier()
        return mine, [view.data_ptr() for view in views]

    def stream(self) -> int:
        """Return the address of the current stream."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def barrier(self) -> None:
        """Wait until every rank's device has finished what came before."""
        torch.cuda.synchronize(self.device)
        self._ring.exchange([])
