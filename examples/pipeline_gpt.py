"""Train a GPT over the stages of a pipeline, each stage captured in CUDA graphs.

The first stage has the embeddings, and the last one uses the same weight for its logits. Stages
exchange activations and gradients by legacy point-to-point operators, between the graphs. The
number of microbatches changes during the training, which needs no new capture unless more of them
are between forward and backward than ever before. The program trains twice, eagerly and captured,
and compares all losses and weights bit for bit:

    torchrun --standalone --nproc-per-node 2 examples/pipeline_gpt.py
    torchrun --standalone --nproc-per-node 2 examples/pipeline_gpt.py --chunks 2
    torchrun --standalone --nproc-per-node 4 examples/pipeline_gpt.py --parallel 2

--chunks is the number of virtual stages per rank. --parallel is the number of ranks per stage: each
has a part of the MLPs, and sends its part of each activation (partial_send, partial_recv,
partial_allgather). --capture layer builds the stages with the legacy PipelineLayer, --capture step
captures the whole step, with its sends and receives. Exit code 1 if any loss or weight differs.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import commlib
from commlib import graph
from commlib.compat import paddle

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS, BLOCKS = 64, 32, 4, 16, 2, 4
SHAPE = (ROWS, LENGTH, WIDTH)
LEARNING_RATE, MOMENTUM = 0.1, 0.9
# The first number of each kind of ring.
PART_RING, TIED_RING, PIPELINE_RING, LEGACY_RING, EDGE_RING = 10, 20, 30, 40, 50

Step = Callable[[list[Tensor], list[Tensor]], list[Tensor]]


class Layout(NamedTuple):
    """Where this rank is in the grid of stages and parts.

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

    def rank_of(self, place: int, part: int | None = None) -> int:
        """Return the rank at a place of the pipeline, of this rank's part unless given."""
        return place * self.parts + (self.part if part is None else part)

    def connect(self) -> None:
        """Create the rings: of this rank's stage, of its pipeline, and of the tied weights."""
        stage = [self.rank_of(self.place, part) for part in range(self.parts)]
        commlib.new_ring(PART_RING + self.place, stage)
        pipeline = [self.rank_of(place) for place in range(self.depth)]
        commlib.new_ring(PIPELINE_RING + self.part, pipeline)
        if self.place in (0, self.depth - 1):
            commlib.new_ring(TIED_RING + self.part, [pipeline[0], pipeline[-1]])


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


class Head(torch.nn.Module):
    """Logits by the weight of the embeddings."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return logits(self.embedding, x)


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
        own = paddle.c_identity(F.layer_norm(x, (WIDTH,)), ring_id=self._ring_id)
        own = F.linear(F.gelu(F.linear(own, self.up)), self.down)
        return x + paddle.mp_allreduce_sum(own, ring_id=self._ring_id, use_calc_stream=True)

    def _attention(self, x: Tensor) -> Tensor:
        heads = F.linear(x, self.qkv).view(ROWS, LENGTH, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)).masked_fill(future, -1e9)
        mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(SHAPE)
        return F.linear(mixed, self.projection)


class Stages:
    """This rank's stages.

    Attributes:
        modules: The stages by their numbers.
        parameters: Their parameters.
    """

    def __init__(self, layout: Layout, chunks: int, capture: str) -> None:
        count = layout.depth * chunks
        self._tied_ring = TIED_RING + layout.part
        ends = [0, *(1 + i * BLOCKS // count for i in range(1, count)), BLOCKS + 2]
        numbers = range(layout.place, count, layout.depth)
        self._legacy = legacy_layer(layout, ends, chunks) if capture == "layer" else None
        if self._legacy is not None:
            self.modules = dict(zip(numbers, self._legacy.chunks, strict=True))
        else:
            self.modules = {
                i: stage(range(ends[i], ends[i + 1]), layout, capture == "stages") for i in numbers
            }
        parts = [x for module in self.modules.values() for x in module.modules()]
        self._tied = [x.weight for x in parts if isinstance(x, Embedding)]
        found = [x for module in self.modules.values() for x in module.parameters()]
        self.parameters = [*{id(x): x for x in found}.values()]

    @property
    def captured(self) -> list[graph.CapturedFunction]:
        """Return the captured stretches of layers."""
        pipelines = [x for x in self.modules.values() if isinstance(x, graph.Pipeline)]
        return [part for pipeline in pipelines for part in pipeline.captured]

    def tie(self) -> None:
        """Add up the gradients of the tied weight, which the first and the last rank have."""
        if self._legacy is not None:
            self._legacy.allreduce_shared_weight_gradients()
            return
        for weight in self._tied:
            ring_id, grad = self._tied_ring, weight.grad
            assert grad is not None
            weight.grad = paddle.c_allreduce_sum(grad, ring_id=ring_id, use_calc_stream=True)


def stage(numbers: range, layout: Layout, captured: bool) -> torch.nn.Module:
    """Return a stage of some layers; the embeddings and the head stay outside its graphs."""
    layers = [layer(i, layout).to(layout.device) for i in numbers]
    if not captured:
        return torch.nn.Sequential(*layers)
    return graph.pipeline(layers, shared=[x for x in layers if not isinstance(x, Block)])


def layer(number: int, layout: Layout) -> torch.nn.Module:
    """Return a layer of the model."""
    if number == 0:
        return Embedding()
    return Block(number, layout) if number <= BLOCKS else Head(Embedding())


def legacy_layer(layout: Layout, ends: list[int], chunks: int) -> paddle.PipelineLayer:
    """Return this rank's stages as legacy code describes them."""
    blocks = [paddle.LayerDesc(Block, i, layout) for i in range(1, BLOCKS + 1)]
    first = paddle.SharedLayerDesc("embedding", Embedding)
    last = paddle.SharedLayerDesc("embedding", Embedding, logits)
    return paddle.PipelineLayer(
        [first, *blocks, last],
        layout.depth,
        seg_method=ends,
        num_virtual_pipeline_stages=chunks,
        use_cudagraph=True,
        ring_id=PIPELINE_RING + layout.part,
        shared_ring_id=LEGACY_RING + layout.part,
    )


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


class Schedules:
    """Schedules by the number of microbatches."""

    def __init__(self, name: str, depth: int, chunks: int) -> None:
        self._make = getattr(graph.PipelineSchedule, name)
        self._depth, self._chunks = depth, chunks
        self._known: dict[int, graph.PipelineSchedule] = {}

    def of(self, microbatches: int) -> graph.PipelineSchedule:
        """Return the schedule for so many microbatches."""
        if microbatches not in self._known:
            schedule = self._make(self._depth, microbatches, chunks=self._chunks)
            self._known[microbatches] = schedule
        return self._known[microbatches]


class Run(NamedTuple):
    """What a training has left on this rank.

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
    stages = Stages(layout, chosen.chunks, capture)
    optimizer = torch.optim.SGD(stages.parameters, lr=LEARNING_RATE, momentum=MOMENTUM)
    schedules = Schedules(chosen.schedule, layout.depth, chosen.chunks)
    transport: Any = LegacyTransport(layout)
    if capture == "step":
        column = [layout.rank_of(place) for place in range(layout.depth)]
        first = EDGE_RING + layout.part * layout.depth * layout.depth
        transport = schedules.of(layout.depth).connect(first, SHAPE, ranks=column)

    def step(inputs: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
        def loss(x: Tensor, number: int) -> Tensor:
            return F.cross_entropy(x.flatten(0, 1), targets[number].flatten()) / len(targets)

        optimizer.zero_grad()
        losses = schedules.of(len(inputs)).run(stages.modules, inputs, loss, transport)
        stages.tie()
        optimizer.step()
        return losses

    call: Step = graph.capture(step, outputs="copy") if capture == "step" else step
    captured: list[Any] = [call] if capture == "step" else stages.captured
    draw, losses, graphs = torch.Generator().manual_seed(7), list[float](), list[int]()
    for microbatches in chosen.microbatches:
        for _ in range(chosen.steps):
            found = call(*batch(draw, microbatches, layout.device))
            losses += [float(loss) * microbatches for loss in found]
        graphs.append(sum(len(graph.report(part)) for part in captured))
    return Run(losses, [x.detach().clone() for x in stages.parameters], graphs)


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
    place, part = divmod(ring.rank, parallel)
    layout = Layout(ring.device, ring.size // parallel, place, parallel, part)
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
