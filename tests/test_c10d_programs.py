"""Programs of torch on the backend "commlib": the same bits as with torch's own backends."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.support.runs_on import runs_on
from tests.support.torch_groups import assert_same_as_stock, whole

Tensor = torch.Tensor
Model = nn.Sequential


def model(device: torch.device) -> Model:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).to(device)


def batch(device: torch.device, step: int) -> Tensor:
    torch.manual_seed(10 * dist.get_rank() + step)
    return torch.randn(4, 16).to(device)


def train(forward: Callable[[Tensor], Tensor], optimizer: Any, device: torch.device) -> None:
    for step in range(2):
        optimizer.zero_grad()
        forward(batch(device, step)).square().mean().backward()
        optimizer.step()


def data_parallel(device: torch.device) -> Any:
    wrapped = DistributedDataParallel(model(device), bucket_cap_mb=0.001)  # several buckets
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), device)
    return list(wrapped.parameters())


def sharded_optimizer(device: torch.device) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    wrapped = DistributedDataParallel(model(device))
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01)
    train(wrapped, optimizer, device)
    return list(wrapped.parameters())


def sharded_checkpoint(device: torch.device) -> Any:
    """FSDP2, then its weights through a checkpoint."""
    mesh, sharded = init_device_mesh(device.type, (2,)), model(device)
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    train(sharded, torch.optim.AdamW(sharded.parameters(), 0.01), device)
    trained = whole(sharded.parameters())
    folder: Any = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    state = {"model": sharded.state_dict()}
    dcp.save(state, checkpoint_id=folder[0])
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    dcp.load(state, checkpoint_id=folder[0])
    return trained, whole(sharded.parameters())


def tensor_parallel(device: torch.device) -> Any:
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallel = parallelize_module(model(device), mesh["tp"], plan)
    torch.manual_seed(3)
    x = torch.randn(4, 16).to(device)
    y = parallel(x)
    y.sum().backward()
    compiled = torch.compile(parallel, backend="aot_eager", fullgraph=True)
    return y, whole(p.grad for p in parallel.parameters()), compiled(x)


def redistributed(device: torch.device) -> Any:
    mesh = init_device_mesh(device.type, (2,))
    x = distribute_tensor(torch.arange(64.0).view(8, 8).to(device), mesh, [Shard(0)])
    return x.redistribute(placements=[Shard(1)]).to_local(), x.redistribute(
        placements=[Replicate()]
    ).to_local()


def compiled(device: torch.device) -> Any:
    """The functional ops, and legacy calls that Dynamo rewrites to them."""

    def step(x: Tensor) -> tuple[Tensor, ...]:
        group = dist.group.WORLD
        reduced = functional.all_reduce(x, "sum", group)
        scattered = functional.reduce_scatter_tensor(x, "sum", 0, group)
        gathered = functional.all_gather_tensor(x, 0, group)
        exchanged = functional.all_to_all_single(x, [2, 2], [2, 2], group)
        several = functional.all_reduce_coalesced([x, x + 1], "max", group)
        y = x + 1
        dist.all_reduce(y)
        return reduced + 0, scattered + 0, gathered + 0, exchanged + 0, several[1] + 0, y

    x = batch(device, 0)
    eager = step(x)
    return *torch.compile(step, backend="aot_eager", fullgraph=True)(x), *eager


@runs_on("ranks", deadline=120)
def test_programs(ring: Any) -> None:
    for program in (data_parallel, sharded_optimizer, sharded_checkpoint, tensor_parallel):
        assert_same_as_stock(ring, program)


@runs_on("ranks", deadline=120)
def test_functional_collectives(ring: Any) -> None:
    for program in (redistributed, compiled):
        assert_same_as_stock(ring, program)
