"""Train with an optimizer whose step is one CUDA graph: accumulate, norm, clip, update.

Every rank trains a small model in bfloat16 on its own data. After each backward the low-precision
gradients are added to float32 ones. After the last backward the global norm over all ranks is
taken. The gradients are clipped by it, and 200 and more small tensors are updated. Those are
hundreds of short kernels and one all-reduce: captured once, replayed as two graphs. The
program trains twice, eagerly and captured, and compares the losses bit for bit:

    torchrun --standalone --nproc-per-node 2 examples/optimizer_graph.py

Exit code 1 if any loss differs.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import commlib
from commlib import graph, ops

LAYERS, WIDTH, ROWS, MICROBATCHES = 104, 8, 16, 2  # a weight and a bias a layer: 208 tensors
LEARNING_RATE, MOMENTUM, MOST = 0.05, 0.9, 1.0


class Optimizer:
    """Float32 copies of the weights and gradients of a low-precision model."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = weights
        self.master = [weight.detach().float() for weight in weights]
        self.grads = [torch.zeros_like(weight) for weight in self.master]
        self.momenta = [torch.zeros_like(weight) for weight in self.master]
        for weight in weights:  # in place from the first backward on: graphs know addresses
            weight.grad = torch.zeros_like(weight)

    def accumulate(self) -> None:
        """Add the gradients of one backward to the float32 ones, and clear them."""
        for weight, grad in zip(self.weights, self.grads, strict=True):
            assert weight.grad is not None
            grad.add_(weight.grad)
            weight.grad.zero_()

    def step(self) -> None:
        """Clip by the norm over all ranks, update, and start again."""
        squares = torch.stack([grad.square().sum() for grad in self.grads]).sum()
        norm = ops.all_reduce(squares).sqrt()
        factor = torch.clamp(MOST / (norm + 1e-6), max=1.0)
        groups = zip(self.weights, self.master, self.grads, self.momenta, strict=True)
        for weight, master, grad, momentum in groups:
            momentum.mul_(MOMENTUM).add_(grad * factor)
            master.sub_(momentum * LEARNING_RATE)
            weight.copy_(master)
            grad.zero_()


def train(steps: int, captured: bool) -> tuple[list[float], list[str]]:
    """Train from the same start on this rank's data; return its losses and what was captured."""
    ring = commlib.comm()
    draw = torch.Generator().manual_seed(7 + ring.rank)
    weights = [weight.to(ring.device).requires_grad_() for weight in model()]
    optimizer = Optimizer(weights)
    accumulate = calls(optimizer.accumulate, captured)
    step = calls(optimizer.step, captured)
    losses = []
    for _ in range(steps):
        for _ in range(MICROBATCHES):
            x = torch.randn(ROWS, WIDTH, generator=draw).bfloat16().to(ring.device)
            loss = (forward(weights, x) - x.roll(1, 1)).float().square().mean() / MICROBATCHES
            loss.backward()
            accumulate()
            losses.append(float(loss.detach()))
        step()
    graphs = [call for call in (accumulate, step) if isinstance(call, graph.CapturedFunction)]
    rows = [row for call in graphs for row in graph.report(call)]
    return losses, [
        f"{row['function']}: {row['nodes']} nodes, {row['replays']} replays" for row in rows
    ]


def calls(function: Callable[[], None], captured: bool) -> Callable[[], object]:
    """Return a function without its own gradients, as it is or captured."""
    quiet = torch.no_grad()(function)
    return graph.capture(quiet) if captured else quiet


def model() -> list[Tensor]:
    """Return the weights and biases of all layers, the same on every rank."""
    draw = torch.Generator().manual_seed(1)
    params = []
    for _ in range(LAYERS):
        params.append((torch.randn(WIDTH, WIDTH, generator=draw) * 0.02).bfloat16())
        params.append(torch.zeros(WIDTH, dtype=torch.bfloat16))
    return params


def forward(weights: list[Tensor], x: Tensor) -> Tensor:
    """Pass ``x`` through residual layers."""
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        x = x + torch.tanh(x @ weight + bias)
    return x


def compare(steps: int) -> tuple[list[tuple[float, float]], list[str]]:
    """Return the losses of the eager and of the captured run, and what that one captured."""
    eager, _ = train(steps, captured=False)
    captured, graphs = train(steps, captured=True)
    return list(zip(eager, captured, strict=True)), graphs


def main() -> int:
    """Run the comparison and print it on rank 0; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6, help="steps of training (6)")
    steps = parser.parse_args().steps
    if steps < 1:
        parser.exit(2, f"--steps {steps}: expected 1 or more\n")
    ring = commlib.init()
    pairs, graphs = compare(steps)
    same = all(eager == captured for eager, captured in pairs)
    if ring.rank == 0:
        print("backward   eager loss   captured loss")
        for number, (eager, captured) in enumerate(pairs):
            print(f"{number:8}   {eager:10.7f}   {captured:13.7f}")
        print("bit for bit the same" if same else "the losses differ")
        print(*graphs, sep="\n")
    commlib.shutdown()
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
