"""Train a tensor-parallel GPT that is written for paddle.distributed.fleet.

The program is what a team runs today with two imports changed: fleet creates the groups, parallel
layers hold this rank's parts of the weights, mp_ops join the two ends of the tied embedding. The
ranks that --mp leaves over are data-parallel. FLAGS_dynamic_static_unified_comm chooses the engine
below; the losses are the same bit by bit on both.

    torchrun --standalone --nproc-per-node 2 examples/fleet_gpt.py
    export FLAGS_dynamic_static_unified_comm=1
    torchrun --standalone --nproc-per-node 2 examples/fleet_gpt.py

It prints one line per step: its number, the mean loss, and the loss as a hexadecimal float, in
which nothing is rounded.
"""

import argparse
import math
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commlib
import commlib.compat.paddle.distributed as dist
from commlib.compat.paddle.distributed import fleet, mp_ops
from commlib.compat.paddle.distributed.fleet import meta_parallel

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, BLOCKS = 64, 32, 4, 16, 4, 2
LEARNING_RATE, DROPOUT, SEED = 0.01, 0.1, 2024


def small(weight: Tensor) -> None:
    """Fill a weight as GPT does."""
    nn.init.normal_(weight, std=0.1)


class Attention(nn.Module):
    """Causal self-attention: each rank computes its own heads."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.heads, self.head_width = HEADS // ranks, WIDTH // HEADS
        self.qkv = meta_parallel.ColumnParallelLinear(
            WIDTH, 3 * WIDTH, weight_attr=small, has_bias=True, gather_output=False
        )
        self.projection = meta_parallel.RowParallelLinear(
            WIDTH, WIDTH, weight_attr=small, input_is_parallel=True
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return what every position gathers from those before it. The masks differ per rank."""
        batch, length, _ = x.shape
        mixed = self.qkv(x).view(batch, length, self.heads, 3 * self.head_width)
        q, k, v = mixed.transpose(1, 2).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_width)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        shares = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
        with meta_parallel.get_rng_state_tracker().rng_state():
            shares = F.dropout(shares, DROPOUT, self.training)
        seen = (shares @ v).transpose(1, 2).reshape(batch, length, -1)
        projected: Tensor = self.projection(seen)
        return projected


class Block(nn.Module):
    """Attention and two linear layers. The masks after their sums are the same on every rank."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(ranks)
        self.up = meta_parallel.ColumnParallelLinear(
            WIDTH, 4 * WIDTH, weight_attr=small, has_bias=True, gather_output=False
        )
        self.down = meta_parallel.RowParallelLinear(
            4 * WIDTH, WIDTH, weight_attr=small, input_is_parallel=True
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, the same on every rank of the tensor-parallel group."""
        x = x + F.dropout(self.attention(self.norm_attention(x)), DROPOUT, self.training)
        hidden = F.gelu(self.up(self.norm_mlp(x)))
        return x + F.dropout(self.down(hidden), DROPOUT, self.training)


class GPT(nn.Module):
    """A decoder whose output layer shares the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        hybrid = fleet.get_hybrid_communicate_group()
        self.group = hybrid.get_model_parallel_group()
        self.words = meta_parallel.VocabParallelEmbedding(VOCABULARY, WIDTH, weight_attr=small)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(self.group.nranks) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Return this rank's part of the logits."""
        x = self.words(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        same = mp_ops._c_identity(self.norm(x), group=self.group)
        assert same is not None  # None is for processes outside the group
        return same @ self.words.weight.t()


def batches(steps: int, rank: int, device: torch.device) -> list[Tensor]:
    """Return token ids for every step, the same on every rank of a tensor-parallel group.

    Each id is followed by the next one or the one after it.
    """
    generator = torch.Generator().manual_seed(100 + rank)
    hops = torch.randint(1, 3, (steps, BATCH, LENGTH + 1), generator=generator)
    return list((hops.cumsum(-1) % VOCABULARY).to(device))


def start(mp_degree: int) -> None:
    """Create the groups and seed the generators."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": -1, "mp_degree": mp_degree, "pp_degree": 1}
    strategy.tensor_parallel_configs = {"tensor_init_seed": SEED}
    fleet.init(is_collective=True, strategy=strategy)


def train(steps: int) -> list[float]:
    """Return the loss of each step, averaged over the data-parallel ranks."""
    hybrid = fleet.get_hybrid_communicate_group()
    device = hybrid.get_model_parallel_group().ring.device
    model = fleet.distributed_model(GPT().to(device))
    loss_of = meta_parallel.ParallelCrossEntropy()
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), LEARNING_RATE))
    losses = []
    for text in batches(steps, hybrid.get_data_parallel_rank(), device):
        loss = loss_of(model(text[:, :-1]), text[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        mean = loss.detach()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=hybrid.get_data_parallel_group())
        losses.append(float(mean))
    return losses


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    ranks = dist.get_world_size()
    parser.add_argument("--mp", type=int, default=ranks, help="tensor-parallel ranks (all)")
    parser.add_argument("--steps", type=int, default=6, help="training steps (default: 6)")
    chosen = parser.parse_args()
    if chosen.steps < 1:
        parser.exit(2, f"--steps {chosen.steps}: expected 1 or more\n")
    if chosen.mp < 1 or HEADS % chosen.mp or ranks % chosen.mp:
        parser.exit(2, f"--mp {chosen.mp}: expected a divisor of {HEADS} heads and {ranks} ranks\n")
    return chosen


def main() -> None:
    """Train, and let rank 0 report."""
    chosen = options()
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(
            True, warn_only=True
        )  # a CPU rank has one thread: one order
    start(chosen.mp)
    losses = train(chosen.steps)
    if fleet.is_first_worker():
        print(f"{dist.get_world_size()} ranks on {commlib.comm(0).engine}, mp_degree {chosen.mp}")
        for number, loss in enumerate(losses):
            print(f"{number} {loss:.4f} {loss.hex()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
