"""The legacy engine: a torch.distributed process group for each ring."""

from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from commlib import _host_group
from commlib._c10d import C10dContext


class LegacyCommContext(C10dContext):
    """A ring over ``torch.distributed``: NCCL on GPUs, gloo on CPUs.

    On GPUs the NCCL communicator (about 0.5 GB) is made by torch at the ring's first call. gloo
    connects at once: a lone send and receive must not wait for members that take no part.
    """

    engine: ClassVar[str] = "c10d"
    _free_before: int | None = None

    @property
    def has_communicator(self) -> bool:
        """Whether torch has made the group's communicator; on GPUs the first call does."""
        return super().has_communicator and self._free_before is None

    def _make(self, store: dist.Store, wait: timedelta) -> Any:
        group = dist.ProcessGroup(store, self.rank, self.size)
        backend: Any
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            backend = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            kind = dist.ProcessGroup.BackendType.NCCL
            self._free_before = torch.cuda.mem_get_info(self.device)[0]
        else:
            backend = _host_group.connect(store, self.rank, self.size, wait)
            kind = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        group._register_backend(self.device, kind, backend)
        return group

    def _issued(self, work: Any) -> Any:
        if self._free_before is not None:  # the first call has just made the communicator
            taken = self._free_before - torch.cuda.mem_get_info(self.device)[0]
            self.communicator_bytes, self._free_before = max(0, taken), None
        return super()._issued(work)
