"""Train a mixture-of-experts layer whose experts are spread over all ranks.

Every rank has its own tokens and its own experts. A top-2 gate chooses two experts a token. A
capacity drops what an expert has no room for. global_scatter brings the tokens to their experts,
and global_gather brings the results back. Each rank then trains the same model again by itself,
with all tokens and all experts on a ring of one rank. It compares the losses:

    torchrun --standalone --nproc-per-node 2 examples/moe_layer.py

The number of ranks must divide the 8 experts. Both runs work in float64; they add the same numbers
in another order, so losses may differ by rounding: by 1e-12 of their value at most. Exit code 1 if
they differ by more.

The results of these operators have as many rows as were chosen, which no graph can hold. Two other
layers have shapes that do not depend on the choices. One keeps the calls of the first, and gives
them capacity= and counts on the device: its losses are those of the first layer, within the same
tolerance. The other uses expert_dispatch and expert_combine: its losses differ a little, because
the weights of the experts are rounded to float32. The whole training step of each is captured once
and replayed, with other choices each time. Losses of captured steps must have the same bits as
those of eager steps.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import commlib
from commlib import graph, ops

TOKENS, WIDTH, HIDDEN, EXPERTS, CAPACITY = 48, 16, 32, 8, 14  # TOKENS of all ranks; per expert
LEARNING_RATE, TOLERANCE = 0.5, 1e-12


@dataclass
class Layer:
    """The gate, which every rank has, and this rank's experts; ``ring_id`` joins the ranks."""

    ring_id: int
    gate: Tensor  # [WIDTH, EXPERTS]
    up: Tensor  # [own experts, WIDTH, HIDDEN]
    down: Tensor  # [own experts, HIDDEN, WIDTH]

    @property
    def parameters(self) -> list[Tensor]:
        """All weights."""
        return [self.gate, self.up, self.down]

    def __call__(self, x: Tensor) -> Tensor:
        """Return, for each token of ``x``, the weighted outputs of the experts that it reached."""
        value, chosen = (x @ self.gate).softmax(1).topk(2, dim=1)
        local_count, global_count, order = self.plan(chosen.flatten())
        scattered = ops.global_scatter(x[order // 2], local_count, global_count, self.ring_id)
        back = ops.global_gather(
            self.experts(scattered, global_count), local_count, global_count, self.ring_id
        )
        weighted = back * value.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // 2, weighted)

    def plan(self, chosen: Tensor, total: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the counts of both directions, and the choices in the order of their experts.

        An expert with too many tokens takes those of the lower ranks first. ``total`` is the number
        of choices to return; the default is all that were not dropped, and the host waits for it.
        """
        ring, local_experts = commlib.comm(self.ring_id), len(self.up)
        asked = ops.all_to_all(ops.number_count(chosen, EXPERTS), self.ring_id)
        capacity = torch.full((local_experts,), CAPACITY, device=chosen.device)
        global_count = ops.limit_by_capacity(asked, capacity, ring.size)
        local_count = ops.all_to_all(global_count, self.ring_id)
        pruned = ops.prune_gate_by_capacity(chosen, local_count, local_experts, ring.size)
        order = ops.assign_pos(pruned, local_count.cumsum(0), total=total)
        return local_count, global_count, order

    def experts(self, rows: Tensor, global_count: Tensor) -> Tensor:
        """Run each expert on its rows, which are by expert, then by the rank they came from."""
        lengths = global_count.view(-1, len(self.up)).sum(0).tolist()
        parts = zip(rows.split(lengths), self.up, self.down, strict=True)
        return torch.cat([torch.relu(part @ up) @ down for part, up, down in parts])


class CountedLayer(Layer):
    """The same layer with counts that stay on the device, and rows up to a capacity."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return, for each token of ``x``, the weighted outputs of the experts that it reached."""
        value, chosen = (x @ self.gate).softmax(1).topk(2, dim=1)
        most = chosen.numel()  # dropped choices are at the end of the order, and are not sent
        local_count, global_count, order = self.plan(chosen.flatten(), most)
        counts = local_count, global_count, self.ring_id
        scattered = ops.global_scatter(x[order // 2], *counts, capacity=CAPACITY * len(self.up))
        back = ops.global_gather(self.experts(scattered, global_count), *counts, capacity=most)
        weighted = back * value.flatten()[order].unsqueeze(1)  # rows of dropped choices are 0
        return torch.zeros_like(x).index_add(0, order // 2, weighted)

    def experts(self, rows: Tensor, global_count: Tensor) -> Tensor:
        """Run each expert on a block of CAPACITY places; rows that are not used stay 0."""
        lengths = global_count.view(-1, len(self.up)).sum(0)
        free = torch.arange(CAPACITY, device=rows.device) >= lengths.unsqueeze(1)
        slots = free.flatten().int().argsort(stable=True)  # of each row: the used places first
        blocks = torch.zeros_like(rows).index_copy(0, slots, rows)
        blocks = blocks.view(len(self.up), CAPACITY, WIDTH)
        y = torch.bmm(torch.relu(torch.bmm(blocks, self.up)), self.down)
        return y.flatten(0, 1)[slots]


class FixedShapeLayer(Layer):
    """The same layer over blocks of CAPACITY rows per expert; rows that are not used are 0."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return, for each token of ``x``, the weighted outputs of the experts that it reached."""
        value, chosen = (x @ self.gate).softmax(1).topk(2, dim=1)
        sent = ops.expert_dispatch(
            x, chosen, EXPERTS, CAPACITY, self.ring_id, weights=value, on_overflow="drop"
        )
        y = torch.bmm(torch.relu(torch.bmm(sent.rows, self.up)), self.down)
        return ops.expert_combine(y, sent.handle)


class Losses(NamedTuple):
    """The losses of one step."""

    ranks: float
    one_process: float
    counted: float  # The loss of the layer with counts on the device, over all ranks.
    counted_captured: float  # The loss of the same, from a replay.
    fixed: float  # The loss of the layer with fixed shapes, over all ranks.
    fixed_captured: float  # The loss of the same, from a replay.

    @property
    def apart(self) -> float:
        """Return the largest difference from the loss of one process, as a part of it."""
        others = self.ranks, self.counted
        return max(abs(one - self.one_process) for one in others) / abs(self.one_process)

    @property
    def same_bits(self) -> bool:
        """Return True if captured steps have the losses of eager ones."""
        eager, captured = (self.counted, self.fixed), (self.counted_captured, self.fixed_captured)
        return eager == captured


def drawn(*shape: int, seed: int) -> Tensor:
    """Return the same numbers on every rank, of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-2])


def part(whole: Tensor, ring_id: int) -> Tensor:
    """Return this rank's share of the rows of ``whole``, on its device."""
    ring = commlib.comm(ring_id)
    return whole.chunk(ring.size)[ring.rank].to(ring.device)


def train(
    ring_id: int, steps: int, kind: type[Layer] = Layer, *, capture: bool = False
) -> list[float]:
    """Train over a ring and return the loss of every step, which is that of all its ranks."""
    gate = drawn(WIDTH, EXPERTS, seed=1).to(commlib.comm(ring_id).device)
    up, down = drawn(EXPERTS, WIDTH, HIDDEN, seed=2), drawn(EXPERTS, HIDDEN, WIDTH, seed=3)
    layer = kind(ring_id, gate, part(up, ring_id), part(down, ring_id))
    for weight in layer.parameters:
        weight.requires_grad_()
    x = part(drawn(TOKENS, WIDTH, seed=4) * math.sqrt(TOKENS), ring_id)
    target = part(drawn(TOKENS, WIDTH, seed=5) * math.sqrt(TOKENS), ring_id)

    def one_step() -> Tensor:
        return step(layer, x, target)

    run = graph.capture(one_step) if capture else one_step
    return [float(run()) for _ in range(steps)]


def step(layer: Layer, x: Tensor, target: Tensor) -> Tensor:
    """Make one step of gradient descent and return the loss before it."""
    local_loss = (layer(x) - target).square().sum() / (TOKENS * WIDTH)
    loss = ops.all_reduce(local_loss, layer.ring_id, backward="identity")
    grads = torch.autograd.grad(loss, layer.parameters)
    # An expert has seen the tokens of all ranks; the gate only those of this one.
    gate = ops.all_reduce(grads[0], layer.ring_id)
    with torch.no_grad():
        for weight, grad in zip(layer.parameters, (gate, *grads[1:]), strict=True):
            weight -= LEARNING_RATE * grad
    return loss.detach()


def compare(steps: int) -> list[Losses]:
    """Return the losses of all ranks together, of one process, and of captured steps."""
    rank = commlib.comm().rank
    alone = commlib.new_ring(1 + rank, [rank])
    assert alone is not None  # every rank is the only member of its ring
    runs = (
        train(0, steps),
        train(alone.ring_id, steps),
        train(0, steps, CountedLayer),
        train(0, steps, CountedLayer, capture=True),
        train(0, steps, FixedShapeLayer),
        train(0, steps, FixedShapeLayer, capture=True),
    )
    commlib.CommContextManager.instance().close(alone.ring_id)
    return [Losses(*losses) for losses in zip(*runs, strict=True)]


def show(found: list[Losses], size: int) -> None:
    """Print the losses of all steps."""
    print(
        f"step   loss of {size} ranks   loss of one process   counted           captured          "
        "fixed shapes   captured"
    )
    for number, one in enumerate(found):
        print(
            f"{number:4}   {one.ranks:15.12f}   {one.one_process:19.12f}   {one.counted:.12f}"
            f"    {one.counted_captured:.12f}    {one.fixed:12.9f}   {one.fixed_captured:.9f}"
        )


def main() -> int:
    """Run the comparison and print it on rank 0; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10, help="steps of training (10)")
    steps = parser.parse_args().steps
    if steps < 1:
        parser.exit(2, f"--steps {steps}: expected 1 or more\n")
    ring = commlib.init()
    if EXPERTS % ring.size:
        parser.exit(2, f"{ring.size} ranks: expected a number that divides the {EXPERTS} experts\n")
    results = compare(steps)
    apart = max(one.apart for one in results)
    differing = [number for number, one in enumerate(results) if not one.same_bits]
    if ring.rank == 0:
        show(results, ring.size)
        print(f"largest difference: {apart:.1e} of the loss; allowed {TOLERANCE:.0e}")
        print(f"captured steps that differ from eager ones: {differing or 'none'}")
    commlib.shutdown()
    return int(apart > TOLERANCE or bool(differing))


if __name__ == "__main__":
    sys.exit(main())
