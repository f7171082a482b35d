"""Programs of torch on the backend "commlib" inside graph.capture, and those that need GPUs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from commlib import graph
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, assert_same_as_stock, initialised

TOKENS, WIDTH, ROOM = 6, 16, 8
Step = Callable[[Tensor, Tensor], Tensor]


class Decoder(nn.Module):
    """One layer with a cache of earlier tokens: heads and columns are split over the ranks."""

    cache: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(2, ROOM, heads, WIDTH // 4))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """Return the next state of one token; its key and value enter the cache."""
        q, k, v = self.qkv(x).view(3, 1, *self.cache.shape[2:])
        self.cache.index_copy_(1, position, torch.stack((k, v)))
        keys, values = self.cache
        scores = torch.einsum("ihd,rhd->hr", q, keys)
        later = torch.arange(ROOM, device=x.device) > position
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        x = x + self.out(torch.einsum("hr,rhd->hd", weights, values).reshape(1, -1))
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def split_decoder(device: torch.device, size: int) -> Step:
    """Return a decode step of a decoder whose linear layers are DTensors."""
    torch.manual_seed(2)
    plan: dict[str, Any] = {"qkv": ColwiseParallel(), "up": ColwiseParallel()}
    plan |= {"out": RowwiseParallel(), "down": RowwiseParallel()}
    mesh = init_device_mesh(device.type, (size,))
    model = parallelize_module(Decoder(4 // size).to(device), mesh, plan)
    step: Step = torch.no_grad()(model.forward)
    return step


def split_weights(device: torch.device, size: int) -> Step:
    """Return the forward of a model whose weights FSDP2 gathers layer by layer."""
    torch.manual_seed(2)
    layers = [nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)]
    model = nn.Sequential(*layers).to(device)
    mesh = init_device_mesh(device.type, (size,))
    for part in (layers[0], layers[2], model):
        fully_shard(part, mesh=mesh)

    @torch.no_grad()
    def forward(x: Tensor, position: Tensor) -> Tensor:
        y: Tensor = model(x) + position
        return y

    forward(torch.zeros(1, WIDTH, device=device), torch.zeros(1, device=device))  # sets FSDP up
    return forward


def decoded(step: Step, device: torch.device) -> list[Tensor]:
    """Return the states of some tokens, one after the other."""
    x, states = torch.linspace(-1, 1, WIDTH, device=device).view(1, -1), []
    for token in range(TOKENS):
        x = step(x, torch.tensor([token], device=device)).clone()
        states.append(x)
    return states


def same_from_graphs(ring: Any, make: Callable[[torch.device, int], Step], used: str) -> None:
    """Compare the states from graphs with eager ones; the collective ``used`` is in the graphs."""
    with initialised(ring, OURS[ring.device.type]):
        expected = decoded(make(ring.device, ring.size), ring.device)
        captured = graph.capture(make(ring.device, ring.size), outputs="copy")
        actual = decoded(captured, ring.device)
        for token, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_bits_equal(one, other, f"token {token}")
        (row,) = graph.report(captured)
        assert_equal(row["replays"] >= TOKENS - 2, True, f"replays: {row['replays']}")
        assert_equal(row["eager"], None, "why it is eager")
        assert_equal(
            used in {text.split()[0] for text in row["collectives"]}, True, row["collectives"]
        )
        del captured
        dist.barrier()


@runs_on("unified_ranks", deadline=120)
def test_a_decode_step_of_dtensors(ring: Any) -> None:
    same_from_graphs(ring, split_decoder, "all_reduce")


@runs_on("gpu_ranks", deadline=120)
def test_a_forward_of_fsdp(ring: Any) -> None:
    """FSDP2 frees the gathered weights, which a graph on a CPU can't hold."""
    same_from_graphs(ring, split_weights, "all_gather")


def normalised(device: torch.device) -> Any:
    """Three steps of SyncBatchNorm, forward and backward, then one in evaluation."""
    norm = nn.SyncBatchNorm(8).to(device)
    results: list[Any] = []
    for step in range(3):
        torch.manual_seed(10 * dist.get_rank() + step)
        x = torch.randn(4 + dist.get_rank(), 8, 5).to(device).requires_grad_()
        y = norm(x)
        y.square().sum().backward()
        results += [y, x.grad, norm.weight.grad, norm.bias.grad]
    return [*results, norm.running_mean, norm.running_var, norm.eval()(x)]


@runs_on("gpu_ranks")
def test_sync_batch_norm(ring: Any) -> None:
    """Torch's module takes no CPU tensors."""
    assert_same_as_stock(ring, normalised)
