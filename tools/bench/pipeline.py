"""Benchmark `pipeline`: the GPU memory of pipeline stages in training, eager and from graphs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import commlib
from commlib import CommContext, graph
from commlib.tools.bench.launch import launch
from commlib.tools.bench.machine import gpu_refusal, shares_gpu
from commlib.tools.bench.pair import TIMEOUT
from commlib.tools.bench.report import Report, number, target
from commlib.tools.bench.rounds import spread

ROUNDS = 1  # fresh processes; the bytes hardly differ between them
GRAPHS, EAGER = "graph.pipeline", "eager"
BLOCKS, WIDTH, HEADS, LENGTH, VOCABULARY = 24, 2048, 16, 2048, 50304  # of GPT-3 1.3B
CHUNKS, STEPS = 2, 4  # virtual stages per rank; steps per number of microbatches
MICROBATCHES = (4, 8, 16)
USUAL, MOST, GROWTH = 8, 1.10, 1.02
GIBIBYTE = 2**30
CAPTION = (
    f"GPU memory of training a GPT with {BLOCKS} blocks of width {WIDTH}, {LENGTH} tokens, in "
    f"bfloat16 with AdamW (fused), over {{nproc}} ranks with {CHUNKS} virtual stages each "
    f"(interleaved 1F1B, one sequence per microbatch){{shared}}. taken: the fall of "
    "torch.cuda.mem_get_info from before the model until the last step, on the GPU where it is "
    f"largest, median over fresh processes; {STEPS} steps per number of microbatches, in one "
    f"process. {GRAPHS}: each stage captured by graph.pipeline with its defaults, verified "
    "replays included."
)


def refusal(nproc: int) -> str | None:
    """Say what is missing here; the ranks may share one GPU."""
    return gpu_refusal(nproc, shares=True)


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` ranks, each way in fresh processes."""
    shared = shares_gpu(nproc)
    runs: dict[str, list[list[int]]] = {GRAPHS: [], EAGER: []}
    for _ in range(rounds):
        for name, taken in runs.items():
            taken.append(launch("pipeline", nproc, shared=shared, captured=name == GRAPHS))
    return report(runs, {"nproc": nproc, "rounds": rounds}, shared=shared)


def report(
    found: dict[str, list[list[int]]], settings: dict[str, int], *, shared: bool = False
) -> Report:
    """Turn the bytes of each way and number of microbatches into a table and findings."""
    taken = {
        name: [spread(same).middle / GIBIBYTE for same in zip(*runs, strict=True)]
        for name, runs in found.items()
    }
    rows = [
        (str(count), name, number(values[i]), f"{values[i] / taken[EAGER][i]:.3f}")
        for i, count in enumerate(MICROBATCHES)
        for name, values in taken.items()
    ]
    usual = MICROBATCHES.index(USUAL)
    growth = {name: values[-1] / values[0] for name, values in taken.items()}
    first, last = MICROBATCHES[0], MICROBATCHES[-1]
    return Report(
        name="pipeline",
        caption=CAPTION.format(
            nproc=settings["nproc"], shared=", which share one GPU" if shared else ""
        ),
        columns=("microbatches", "stages", "taken, GiB", f"ratio to {EAGER}"),
        rows=tuple(rows),
        findings=(
            target(
                f"{USUAL} microbatches, {GRAPHS} / {EAGER}",
                taken[GRAPHS][usual] / taken[EAGER][usual],
                MOST,
            ),
            target(
                f"growth from {first} to {last} microbatches, {GRAPHS} / {EAGER}",
                growth[GRAPHS] / growth[EAGER],
                GROWTH,
            ),
        ),
        settings=settings,
    )


# -- on each rank ---------------------------------------------------------------------------------


class Size(NamedTuple):
    """The sizes of a model."""

    blocks: int = BLOCKS
    width: int = WIDTH
    heads: int = HEADS
    length: int = LENGTH
    vocabulary: int = VOCABULARY


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation after attention and MLP."""
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self._heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        output: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return output


def stage_layers(number: int, stages: int, size: Size) -> list[nn.Module]:
    """Return the layers of a stage; the first one has the embedding, the last one the head."""
    layers: list[nn.Module] = [Block(size) for _ in range(size.blocks // stages)]
    if number == 0:
        layers.insert(0, nn.Embedding(size.vocabulary, size.width))
    if number == stages - 1:
        layers += [nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)]
    return layers


def measure(captured: bool) -> list[int]:
    """Return the bytes taken after the steps of each number of microbatches."""
    ring = commlib.init("nccl", timeout=TIMEOUT)
    results = train(ring, Size(), MICROBATCHES, captured=captured)
    commlib.shutdown()
    return [taken for taken, _ in results]


def train(
    ring: CommContext, size: Size, counts: Sequence[int], *, captured: bool
) -> list[tuple[int, list[Tensor]]]:
    """Train with each number of microbatches; return the bytes taken so far, and the losses.

    Bytes are 0 on a CPU. Losses are those of the last step, on the rank of the last stage.
    """
    make = graph.PipelineSchedule.one_f_one_b
    schedules = [make(ring.size, count, chunks=CHUNKS) for count in counts]
    shape = (1, size.length, size.width)
    edges = schedules[0].connect(1, shape, dtype=torch.bfloat16)
    before = _free(ring)
    stages = _stages(ring, size, captured)
    optimizer = torch.optim.AdamW(
        [x for stage in stages.values() for x in stage.parameters()], lr=1e-4, fused=True
    )
    results: list[tuple[int, list[Tensor]]] = []
    for schedule in schedules:
        for step in range(STEPS):
            losses = _step(ring, schedule, stages, size, edges, step)
            optimizer.step()
            optimizer.zero_grad()
        taken = max(row[0] for row in ring.exchange([before - _free(ring)]))
        results.append((taken, losses))
    edges.close()
    return results


def _stages(ring: CommContext, size: Size, captured: bool) -> dict[int, nn.Module]:
    torch.manual_seed(1)
    numbers = range(ring.rank, ring.size * CHUNKS, ring.size)
    with torch.device(ring.device):
        layers = {i: stage_layers(i, ring.size * CHUNKS, size) for i in numbers}
    made = {i: graph.pipeline(x) if captured else nn.Sequential(*x) for i, x in layers.items()}
    return {i: stage.to(torch.bfloat16) for i, stage in made.items()}


def _step(
    ring: CommContext,
    schedule: graph.PipelineSchedule,
    stages: dict[int, nn.Module],
    size: Size,
    edges: Any,
    number: int,
) -> list[Tensor]:
    """Run forward and backward of all microbatches; the ranks draw the same tokens."""
    draw = torch.Generator().manual_seed(number)
    count = schedule.microbatches
    text = torch.randint(size.vocabulary, (count, 1, size.length + 1), generator=draw)
    tokens = text.to(ring.device)

    def loss(x: Tensor, microbatch: int) -> Tensor:
        return F.cross_entropy(x.flatten(0, 1), tokens[microbatch, :, 1:].flatten()) / count

    return schedule.run(stages, [*tokens[..., :-1].contiguous()], loss, edges)


def _free(ring: CommContext) -> int:
    """Return the free bytes of this rank's GPU once every rank is here; 0 on a CPU."""
    if ring.device.type == "cpu":
        return 0
    torch.cuda.synchronize(ring.device)
    ring.exchange([])
    return torch.cuda.mem_get_info(ring.device)[0]
