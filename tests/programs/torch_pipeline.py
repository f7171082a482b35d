"""Train captured stages under torch's own pipeline schedules, and compare with eager stages.

Started by torchrun on two ranks: torch_pipeline.py DEVICE. Prints one line per rank and schedule.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from commlib import graph

WIDTH, ROWS, RANKS = 8, 2, 2
MICROBATCHES = (4, 8, 3)


def keeps_nodes() -> bool:
    """Return True if torch keeps the node of a Function as long as Python holds it.

    Zero-bubble schedules go back to such nodes after their graph is gone.
    """
    twice = _Twice.apply(torch.ones(1, requires_grad=True) * 1)  # type: ignore[no-untyped-call]
    node = twice.grad_fn
    del twice
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


SCHEDULES: list[tuple[Any, int]] = [  # with the stages per rank
    (Schedule1F1B, 1),
    (ScheduleInterleaved1F1B, 2),
    *([(ScheduleInterleavedZeroBubble, 2)] if keeps_nodes() else []),
]


def layers(stage: int, device: torch.device) -> list[torch.nn.Module]:
    """Return the layers of a stage, the same at each call."""
    torch.manual_seed(stage)
    modules = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)]
    return [layer.to(device) for layer in modules]


def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of one microbatch."""
    return (x - target).square().mean()


def train(
    device: torch.device, how: str, kind: Any, chunks: int
) -> tuple[list[torch.Tensor], list[int]]:
    """Return losses, outputs and weights, and the number of graphs after each microbatch count."""
    rank = dist.get_rank()
    make: Any = {
        "eager": lambda parts: torch.nn.Sequential(*parts),
        "pipeline": graph.pipeline,
        "capture": lambda parts: graph.capture(torch.nn.Sequential(*parts), outputs="copy"),
    }[how]
    numbers = [rank + RANKS * chunk for chunk in range(chunks)]
    modules = [make(layers(number, device)) for number in numbers]
    stages = [
        PipelineStage(module, number, RANKS * chunks, device)
        for module, number in zip(modules, numbers, strict=True)
    ]
    captured = [part for x in modules for part in getattr(x, "captured", [x]) if how != "eager"]
    weights = [x for module in modules for x in module.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    results, graphs = list[torch.Tensor](), list[int]()
    for microbatches in (*MICROBATCHES, *MICROBATCHES):
        schedule = kind(stages if chunks > 1 else stages[0], microbatches, loss_fn=loss)
        for step in range(2):
            draw = torch.Generator().manual_seed(step)
            x, y = torch.randn(2, ROWS * microbatches, WIDTH, generator=draw).to(device)
            losses: list[torch.Tensor] = []
            optimizer.zero_grad()
            args = (x,) if rank == 0 else ()
            ends = {"target": y, "losses": losses} if rank == RANKS - 1 else {}
            out = schedule.step(*args, **ends)
            optimizer.step()
            results += [each.detach() for each in (*losses, *([] if out is None else [out]))]
        graphs.append(sum(len(graph.report(part)) for part in captured))
    return [*results, *(x.detach() for x in weights)], graphs


def main() -> None:
    """Compare all ways to run the stages."""
    device = torch.device(sys.argv[1], int(os.environ["LOCAL_RANK"]) if "cuda" in sys.argv else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    for kind, chunks in SCHEDULES:
        expected, _ = train(device, "eager", kind, chunks)
        for mode in ("pipeline", "capture"):
            actual, graphs = train(device, mode, kind, chunks)
            same = all(map(torch.equal, actual, expected)) and len(actual) == len(expected)
            again = graphs[len(MICROBATCHES) - 1 :]
            settled = len({*again}) == 1 and again[0] > 0
            print(f"{kind.__name__}, {mode}: same {same}, settled {settled}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
