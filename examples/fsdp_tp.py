"""Train a small Llama with sharded data parallelism times tensor parallelism, from graphs.

Each weight is split over the ranks of its data-parallel ring, and gathered where it is used: the
gradient of ``all_gather`` is a ``reduce_scatter``. Heads and hidden units are split over the
tensor-parallel ring. ``torch.compile`` traces all of that. The program trains the same model
twice: with Inductor alone, and with ``backend=commlib.graph.backend``. That backend replays forward
and backward from graphs with the collectives inside:

    torchrun --standalone --nproc-per-node 2 examples/fsdp_tp.py            # 2 shards
    torchrun --standalone --nproc-per-node 2 examples/fsdp_tp.py --tensor 2 # 2 halves of each layer

    torchrun --standalone --nproc-per-node 4 examples/fsdp_tp.py --tensor 2 # both

Exit code 1 if a loss or a gradient differs in a bit, or if a replay copies more than the batch.
Expandable segments work: NCCL before 2.29.2 then needs NCCL_GRAPH_REGISTER=0, which this sets.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor
from torch import Tensor, nn

import commlib
from commlib import graph, ops

LEARNING_RATE, EPSILON = 1e-2, 1e-5
DATA, TENSOR = 1, 2  # the numbers of the rings


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of a rank's batch."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    inner: int = 64
    vocabulary: int = 64
    rows: int = 2
    tokens: int = 16


class Sharded(nn.Module):
    """A weight of which each rank of the data-parallel ring holds some rows."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        ring = commlib.comm(DATA)
        self.shard = nn.Parameter(weight.chunk(ring.size)[ring.rank].to(ring.device, copy=True))

    def forward(self) -> Tensor:
        """Return the weight of all ranks of the ring."""
        full_weight: Tensor = ops.all_gather(self.shard, DATA)
        return full_weight


class Norm(nn.Module):
    """The root-mean-square norm of Llama."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight = Sharded(torch.ones(sizes.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with rows of one size."""
        y: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * self.weight()
        return y


class Attention(nn.Module):
    """Causal attention; this rank has some of the heads."""

    turn: Tensor

    def __init__(self, sizes: Sizes, draw: Callable[..., Tensor]) -> None:
        super().__init__()
        hidden, self.width = sizes.hidden, sizes.hidden // sizes.heads
        self.qkv = Sharded(torch.cat([columns(draw(hidden, hidden)) for _ in range(3)]))
        self.out = Sharded(columns(draw(hidden, hidden)))
        angles = torch.outer(
            torch.arange(sizes.tokens), 1e4 ** -torch.linspace(0, 1, self.width // 2)
        )
        device = commlib.comm(DATA).device
        self.register_buffer("turn", torch.stack([angles.cos(), angles.sin()]).to(device))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the tokens learn from those before them."""
        q, k, v = self.split(ops.identity(x, TENSOR) @ self.qkv().T)
        y = nn.functional.scaled_dot_product_attention(
            self.rotated(q), self.rotated(k), v, is_causal=True
        )
        part = y.transpose(1, 2).flatten(2) @ self.out()
        return ops.all_reduce(part, TENSOR, backward="identity")

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by head."""
        parts = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in x.chunk(3, -1))
        q, k, v = parts
        return q, k, v

    def rotated(self, x: Tensor) -> Tensor:
        """Return ``x`` turned by its position."""
        cos, sin = self.turn
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class FeedForward(nn.Module):
    """The gated network; this rank has some of its hidden units."""

    def __init__(self, sizes: Sizes, draw: Callable[..., Tensor]) -> None:
        super().__init__()
        shape = sizes.inner, sizes.hidden
        self.up = Sharded(torch.cat([columns(draw(*shape)) for _ in range(2)]))
        self.down = Sharded(columns(draw(*shape)))

    def forward(self, x: Tensor) -> Tensor:
        """Return what each token becomes by itself."""
        gate, value = (ops.identity(x, TENSOR) @ self.up().T).chunk(2, -1)
        part = (nn.functional.silu(gate) * value) @ self.down()
        return ops.all_reduce(part, TENSOR, backward="identity")


class Layer(nn.Module):
    """Attention and the gated network, each after a norm."""

    def __init__(self, sizes: Sizes, draw: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.attention = Norm(sizes), Attention(sizes, draw)
        self.second, self.feed_forward = Norm(sizes), FeedForward(sizes, draw)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state of the tokens."""
        x = x + self.attention(self.first(x))
        y: Tensor = x + self.feed_forward(self.second(x))
        return y


class Llama(nn.Module):
    """A language model with random weights from a seed; returns its loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        device = commlib.comm(DATA).device
        generator = torch.Generator(device).manual_seed(1)

        def draw(rows: int, width: int) -> Tensor:
            weight = torch.randn(rows, width, device=device, generator=generator)
            return weight / math.sqrt(width)

        self.embedding = Sharded(draw(sizes.vocabulary, sizes.hidden))
        self.layers = nn.ModuleList(Layer(sizes, draw) for _ in range(sizes.layers))
        self.norm, self.head = Norm(sizes), Sharded(draw(sizes.vocabulary, sizes.hidden))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's share of the mean loss of all tokens."""
        x = nn.functional.embedding(tokens, self.embedding())
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.head().T
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss / commlib.comm(DATA).size


def columns(weight: Tensor) -> Tensor:
    """Return the rows of ``weight`` that belong to this rank of the tensor-parallel ring."""
    ring = commlib.comm(TENSOR)
    return weight.chunk(ring.size)[ring.rank]


class Trainer:
    """A compiled model with its optimizer."""

    def __init__(self, sizes: Sizes, backend: Any) -> None:
        self.model = Llama(sizes)
        self.compiled = torch.compile(
            self.model, backend=backend, fullgraph=True, options=fixed_kernels()
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """Make a step and return the loss and the gradients."""
        self.optimizer.zero_grad()
        loss = self.compiled(tokens, targets)
        loss.backward()
        self.optimizer.step()
        grads = [weight.grad for weight in self.model.parameters()]
        return [loss.detach(), *(grad for grad in grads if grad is not None)]


@dataclass
class Comparison:
    """The results of both runs.

    Attributes:
        losses: The mean loss of all ranks, step by step.
        differing: Steps in which a bit of a loss or of a gradient differs.
        copied: Bytes that the last replay has copied.
        batch: Bytes of a batch.
        parameters: Bytes of this rank's parameters.
        report: What was captured.
    """

    losses: list[float] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    copied: int = 0
    batch: int = 0
    parameters: int = 0
    report: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Return True if the graphs compute something else, or copy parameters."""
        return bool(self.differing) or self.copied > self.batch


def make_rings(tensor: int) -> None:
    """Make this rank's data-parallel and tensor-parallel rings: ``tensor`` ranks in a row share."""
    ring = commlib.comm()
    rank, size = ring.rank, ring.size
    first = rank // tensor * tensor
    commlib.new_ring(TENSOR, range(first, first + tensor))
    commlib.new_ring(DATA, range(rank % tensor, size, tensor))


def make_batch(sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a batch of this rank: each token is one more than the token before it."""
    text = torch.randint(sizes.vocabulary, (sizes.rows, 1), generator=generator)
    text = (text + torch.arange(sizes.tokens + 1)) % sizes.vocabulary
    text = text.to(commlib.comm(DATA).device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def fixed_kernels() -> dict[str, Any]:
    """Return settings of Inductor with which no measurement chooses a kernel, and so its bits.

    As options they hold for one compilation. ``torch._inductor.config.deterministic`` does not
    last: Dynamo sets it back after each function that it traces.
    """
    name = "deterministic"
    return {name: True} if name in torch._inductor.list_options() else {}


def compare(steps: int, sizes: Sizes = Sizes()) -> Comparison:
    """Train with Inductor alone and from graphs, step by step."""
    stats, ring = Comparison(), commlib.comm(DATA)
    plain, replayed = Trainer(sizes, "inductor"), Trainer(sizes, graph.backend)
    generator = torch.Generator().manual_seed(2 + ring.rank)
    for step in range(steps):
        batch = make_batch(sizes, generator)
        expected, actual = plain.step(*batch), replayed.step(*batch)
        if not all(map(torch.equal, expected, actual)):
            stats.differing.append(step)
        stats.losses.append(float(ops.all_reduce(actual[0], DATA)))
        stats.batch = sum(each.nbytes for each in batch)
    stats.report = graph.report()
    stats.copied = sum(row["bytes_copied"] for row in stats.report if not row["eager"])
    stats.parameters = sum(weight.nbytes for weight in replayed.model.parameters())
    return stats


def allow_expandable_segments() -> str | None:
    """Keep NCCL from registering buffers of graphs where it can't; return what was set and why."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))
    if "expandable_segments:True" not in settings or not torch.cuda.is_available():
        return None
    version = torch.cuda.nccl.version()
    if version >= (2, 29, 2) or os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        return None
    os.environ["NCCL_GRAPH_REGISTER"] = "0"  # read when NCCL connects
    number = ".".join(map(str, version))
    return (
        f"NCCL_GRAPH_REGISTER=0 is set: NCCL {number} registers only the first piece of a buffer "
        f"in expandable segments"
    )


def main() -> int:
    """Run the comparison and print it on rank 0; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50, help="steps of training (50)")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share a layer (1)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.exit(2, f"--steps {options.steps}: expected 1 or more\n")
    note = allow_expandable_segments()
    ring = commlib.init()
    if options.tensor not in (1, 2, 4) or ring.size % options.tensor:
        parser.exit(2, f"--tensor {options.tensor}: expected 1, 2 or 4, a divisor of {ring.size}\n")
    shards, hidden = ring.size // options.tensor, Sizes().hidden
    if hidden % shards:
        parser.exit(2, f"{shards} shards: expected a divisor of {hidden}\n")
    make_rings(options.tensor)
    stats = compare(options.steps)
    if ring.rank == 0:
        print(f"{shards} shards x {options.tensor} parts of each layer")
        if note:
            print(note)
        print(f"loss: {stats.losses[0]:.4f} at first, {stats.losses[-1]:.4f} after {options.steps}")
        print(f"steps with another bit: {len(stats.differing)} of {options.steps}")
        print(
            f"bytes copied per replay: {stats.copied} (batch {stats.batch}, parameters "
            f"{stats.parameters})"
        )
        print(stats.report)
    commlib.shutdown()
    return int(stats.failed)


if __name__ == "__main__":
    sys.exit(main())
