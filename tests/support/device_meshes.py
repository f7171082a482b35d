"""The stock default group of live ranks, for tests of device meshes."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.torch_groups import STOCK, store_of


def mesh_of(ring: Any) -> DeviceMesh:
    """Return a mesh over all ranks, on a stock group that stays until another test ends it."""
    kind = ring.device.type
    if not dist.is_initialized():
        kwargs = {"rank": ring.rank, "world_size": ring.size, "timeout": timedelta(seconds=30)}
        dist.init_process_group(STOCK[kind], store=store_of(), **kwargs)
    return init_device_mesh(kind, (ring.size,))
