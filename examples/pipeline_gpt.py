"""Train a GPT over the stages of a pipeline, each stage captured in CUDA graphs.

The first stage has the embeddings, and the last one uses the same weight for its logits. Stages
exchange activations and gradients by legacy point-to-point operators, between the graphs. The
number of microbatches changes during the training, which needs no new capture unless more of them
are between forward and backward than ever before. The program trains twice, eagerly and captured,
and compares all losses and weights bit for bit:

    torchrun --standalone --nproc-per-node 2 examples/pipeline_gpt.py
    torchrun --standalone --nproc-per-node 2 examples/pipeline_gpt.py --chunks 2

    torchrun --standalone --nproc-per-node 4 examples/pipeline_gpt.py --parallel 2
    torchrun --standalone --nproc-per-node 4 examples/pipeline_gpt.py --chunks 2

--chunks is the number of virtual stages per rank. --parallel is the number of ranks per stage: each
has a part of the MLPs, and sends its part of each activation (partial_send, partial_recv,
partial_allgather). --capture layer uses the legacy PipelineLayer(use_cudagraph=True) in place of
graph.pipeline. --capture step captures the whole step, with its sends and receives. Exit code 1 if
any loss or weight differs.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import commlib
from commlib import graph
from commlib.compat import paddle

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS, BLOCKS = 64, 32, 4, 16, 2, 8
SHAPE = (ROWS, LENGTH, WIDTH)
LEARNING_RATE, MOMENTUM = 0.1, 0.9
# The first number of each kind of ring.
PART_RING, PIPELINE_RING, SHARED_RING, EDGE_RING = 100, 200, 300, 400


class Layout(NamedTuple):
    """The place of this rank in the grid of stages and parts.

    Attributes:
        device: Its device.
        depth: Ranks of a pipeline.
        place: Position of this rank in its pipeline.
        parts: Ranks per stage.
        part: Position of this rank among them.
    """

    device: torch.device
    depth: int
    place: int
    parts: int
    part: int

    def rank_of(self, place: int) -> int:
        """Return the rank at a place of this rank's pipeline."""
        return place * self.parts + self.part

    @property
    def column(self) -> list[int]:
        """Return the ranks of this rank's pipeline."""
        return [self.rank_of(stage) for stage in range(self.depth)]

    def connect(self) -> None:
        """Create the rings of this rank's stage and of its pipeline."""
        first = self.place * self.parts
        commlib.new_ring(PART_RING + self.place, range(first, first + self.parts))
        commlib.new_ring(PIPELINE_RING + self.part, self.column)


class Embedding(torch.nn.Module):
    """Embeddings of tokens and positions; the last stage has the same ones, for its logits."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=draw) * 0.1)
        self.position = torch.nn.Parameter(torch.randn(LENGTH, WIDTH, generator=draw) * 0.1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the first activation."""
        return F.embedding(ids, self.weight) + self.position


def logits(embedding: Embedding, x: Tensor) -> Tensor:
    """Return the product with the tied weight."""
    return F.linear(F.layer_norm(x, (WIDTH,)), embedding.weight)


class Block(torch.nn.Module):
    """A transformer block: whole attention, and this rank's part of the MLP."""

    def __init__(self, number: int, layout: Layout) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(100 + number)
        self._ring_id = PART_RING + layout.place
        self.qkv = self._drawn(draw, 3 * WIDTH, WIDTH)
        self.projection = self._drawn(draw, WIDTH, WIDTH)
        up, down = self._drawn(draw, 4 * WIDTH, WIDTH), self._drawn(draw, WIDTH, 4 * WIDTH)
        self.up = torch.nn.Parameter(up.detach().chunk(layout.parts)[layout.part].clone())
        self.down = torch.nn.Parameter(down.detach().chunk(layout.parts, 1)[layout.part].clone())

    @staticmethod
    def _drawn(draw: torch.Generator, rows: int, columns: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(rows, columns, generator=draw) / math.sqrt(columns))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation after attention and MLP."""
        x = x + self._attention(F.layer_norm(x, (WIDTH,)))
        hidden = paddle.c_identity(F.layer_norm(x, (WIDTH,)), ring_id=self._ring_id)
        hidden = F.linear(F.gelu(F.linear(hidden, self.up)), self.down)
        return x + paddle.mp_allreduce_sum(hidden, ring_id=self._ring_id, use_calc_stream=True)

    def _attention(self, x: Tensor) -> Tensor:
        heads = F.linear(x, self.qkv).view(ROWS, LENGTH, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)).masked_fill(future, -1e9)
        mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(SHAPE)
        return F.linear(mixed, self.projection)


def legacy_layer(layout: Layout, chunks: int, capture: str) -> paddle.PipelineLayer:
    """Return this rank's stages as legacy code describes them; the embeddings are shared."""
    count = layout.depth * chunks
    blocks = [paddle.LayerDesc(Block, i, layout) for i in range(BLOCKS)]
    first = paddle.SharedLayerDesc("embedding", Embedding)
    last = paddle.SharedLayerDesc("embedding", Embedding, logits)
    return paddle.PipelineLayer(
        [first, *blocks, last],
        layout.depth,
        seg_method=[0, *(1 + i * BLOCKS // count for i in range(1, count)), BLOCKS + 2],
        num_virtual_pipeline_stages=chunks,
        use_cudagraph=capture == "layer",
        ring_id=PIPELINE_RING + layout.part,
        shared_ring_id=SHARED_RING + layout.part,
    )


def captured(stage: torch.nn.Module, shared: Iterable[torch.nn.Module]) -> graph.Pipeline:
    """Return a stage whose blocks are captured, around the layers that another stage shares."""
    modules = {*stage.modules()}
    return graph.pipeline([*stage.children()], shared=[x for x in shared if x in modules])


class LegacyTransport:
    """Activations and gradients by legacy operators on ring 0, in the caller's stream."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def send(self, x: Tensor, move: graph.PipelineMove) -> None:
        """Send a tensor to the same part of another stage, or this rank's part of it."""
        peer, parts = self._layout.rank_of(move.target), self._layout.parts
        if parts == 1:
            paddle.send_v2(x, peer=peer, use_calc_stream=True)
        else:
            paddle.partial_send(x, 0, peer, True, parts, self._layout.part)

    def receive(self, move: graph.PipelineMove) -> Tensor:
        """Return a tensor; the ranks of a stage receive a part each, and gather the others."""
        peer, parts = self._layout.rank_of(move.source), self._layout.parts
        if parts == 1:
            return paddle.recv_v2(SHAPE, torch.float32, peer, use_calc_stream=True)
        part, ring_id = self._layout.part, PART_RING + self._layout.place
        x = paddle.partial_recv(SHAPE, torch.float32, peer, 0, True, parts, part)
        return paddle.partial_allgather(x, parts, part, ring_id, use_calc_stream=True)


class Run(NamedTuple):
    """The results of a training on this rank.

    Attributes:
        losses: The losses of all microbatches, where this rank has the last stage.
        weights: The parameters.
        graphs: How many captured forwards there were after each number of microbatches.
    """

    losses: list[float]
    weights: list[Tensor]
    graphs: list[int]


def train(layout: Layout, chosen: argparse.Namespace, capture: str) -> Run:
    """Train from the same start."""
    model = legacy_layer(layout, chosen.chunks, capture)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    stages = {layout.place + i * layout.depth: stage for i, stage in enumerate(model.chunks)}
    if capture == "stages":
        shared = model.shared_layers.values()
        stages = {number: captured(stage, shared) for number, stage in stages.items()}
    make = getattr(graph.PipelineSchedule, chosen.schedule)
    schedules = {n: make(layout.depth, n, chunks=chosen.chunks) for n in chosen.microbatches}
    transport: Any = LegacyTransport(layout)
    if capture == "step":  # the edges are the same with any number of microbatches
        first = EDGE_RING + layout.part * layout.depth * layout.depth
        schedule = schedules[chosen.microbatches[0]]
        transport = schedule.connect(first, SHAPE, ranks=layout.column)

    def step(inputs: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
        def loss(x: Tensor, number: int) -> Tensor:
            return F.cross_entropy(x.flatten(0, 1), targets[number].flatten()) / len(targets)

        optimizer.zero_grad()
        losses: list[Tensor] = schedules[len(inputs)].run(stages, inputs, loss, transport)
        model.allreduce_shared_weight_gradients()
        optimizer.step()
        return losses

    call: Any = graph.capture(step, outputs="copy") if capture == "step" else step
    draw, losses, graphs = torch.Generator().manual_seed(7), list[float](), list[int]()
    for microbatches in chosen.microbatches:
        for _ in range(chosen.steps):
            batch_losses = call(*batch(draw, microbatches, layout.device))
            losses += [float(loss) * microbatches for loss in batch_losses]
        pipelines = [x for x in stages.values() if isinstance(x, graph.Pipeline)]
        parts = [part for x in pipelines for part in x.captured]
        graphs.append(sum(len(graph.report(x)) for x in ([call] if capture == "step" else parts)))
    return Run(losses, [x.detach().clone() for x in model.parameters()], graphs)


def batch(
    draw: torch.Generator, microbatches: int, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tokens of all microbatches, and those that follow them."""
    starts = torch.randint(VOCABULARY, (microbatches, ROWS, 1), generator=draw)
    text = ((starts + 5 * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
    return [*text[..., :-1].contiguous()], [*text[..., 1:].contiguous()]


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20, help="steps per number of microbatches")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 3])
    parser.add_argument("--chunks", type=int, default=1, help="virtual stages per rank (1)")
    parser.add_argument("--parallel", type=int, default=1, help="ranks per stage (1)")
    parser.add_argument("--schedule", choices=("one_f_one_b", "gpipe"), default="one_f_one_b")
    parser.add_argument("--capture", choices=("stages", "layer", "step"), default="stages")
    chosen = parser.parse_args(arguments)
    for name in ("steps", "chunks", "parallel"):
        if getattr(chosen, name) < 1:
            parser.exit(2, f"--{name} {getattr(chosen, name)}: expected 1 or more\n")
    if min(chosen.microbatches) < 1:
        parser.exit(2, f"--microbatches {min(chosen.microbatches)}: expected 1 or more\n")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    depth = ranks // chosen.parallel
    if ranks % chosen.parallel or depth < 2 or BLOCKS % (depth * chosen.chunks):
        parser.exit(
            2,
            f"{ranks} ranks for {BLOCKS} blocks: expected 2 or more times --parallel, and ranks / "
            f"--parallel * --chunks to divide {BLOCKS}\n",
        )
    return chosen


def layout_of(parallel: int) -> Layout:
    """Return this rank's place, after its rings are there."""
    ring = commlib.comm()
    stage, part = divmod(ring.rank, parallel)
    layout = Layout(ring.device, ring.size // parallel, stage, parallel, part)
    layout.connect()
    return layout


def main() -> int:
    """Train both ways, print the losses where the last stage is; return the exit code."""
    chosen = options()
    commlib.init()
    layout = layout_of(chosen.parallel)
    eager, captured = (train(layout, chosen, capture) for capture in ("no", chosen.capture))
    same = eager.losses == captured.losses
    same &= all(map(torch.equal, eager.weights, captured.weights))
    if layout.place == layout.depth - 1 and layout.part == 0:
        print(f"loss of the first microbatch {eager.losses[0]:.7f}, {captured.losses[0]:.7f}")
        print(f"loss of the last microbatch  {eager.losses[-1]:.7f}, {captured.losses[-1]:.7f}")
        for microbatches, graphs in zip(chosen.microbatches, captured.graphs, strict=True):
            print(f"captured forwards after steps of {microbatches} microbatches: {graphs}")
        print("bit for bit the same" if same else "the losses or the weights differ")
    commlib.shutdown()
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
