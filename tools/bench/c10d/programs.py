"""Training programs that the benchmark `c10d` runs on a process group: DDP and FSDP2."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from commlib.tools.bench.pipeline import Block, Size, stage_layers

DDP, FSDP = "DDP", "FSDP2"
Step = Callable[[], Tensor]  # returns its loss


class Stack(NamedTuple):
    """Linear layers with ReLU, and the rows of a batch; as many parameters as ResNet-50."""

    layers: int = 77
    width: int = 576
    rows: int = 4096


class Transformer(NamedTuple):
    """A GPT of a billion parameters, and the sequences of a batch."""

    size: Size = Size(blocks=18, width=2048, heads=16, length=1024, vocabulary=32000)
    rows: int = 2


STACK_ON_CPUS = Stack(layers=4, width=32, rows=8)
TRANSFORMER_ON_CPUS = Transformer(Size(blocks=2, width=32, heads=2, length=8, vocabulary=64))


def make_step(program: str, group: dist.ProcessGroup, device: torch.device) -> Step:
    """Return a training step of a program on a group; the weights are the same each time."""
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    if program == DDP:
        return data_parallel(group, device, Stack() if on_gpu else STACK_ON_CPUS)
    return sharded(group, device, Transformer() if on_gpu else TRANSFORMER_ON_CPUS)


def data_parallel(group: dist.ProcessGroup, device: torch.device, stack: Stack) -> Step:
    """Return a step of SGD on whole weights; DDP sums the gradients, bucket by bucket."""
    layers: list[nn.Module] = []
    for _ in range(stack.layers):
        layers += [nn.Linear(stack.width, stack.width, device=device), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    draw = torch.Generator(device).manual_seed(1 + dist.get_rank())
    x = torch.randn(stack.rows, stack.width, device=device, generator=draw)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def sharded(group: dist.ProcessGroup, device: torch.device, work: Transformer) -> Step:
    """Return a step of AdamW on weights that FSDP2 gathers layer by layer."""
    # To DTensor meshes of the same ranks and names are equal, whatever their groups.
    names = (dist.get_backend(group),)
    mesh, size = DeviceMesh.from_group(group, device.type, mesh_dim_names=names), work.size
    with torch.device(device):
        model = nn.Sequential(*stage_layers(0, 1, size))
    options: dict[str, Any] = {"mesh": mesh}
    if device.type == "cuda":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    draw = torch.Generator(device).manual_seed(1 + dist.get_rank())
    shape = (work.rows, size.length + 1)
    text = torch.randint(size.vocabulary, shape, device=device, generator=draw)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].flatten()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
