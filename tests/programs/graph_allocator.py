"""One rank whose graphs take memory from the allocator of the flag: results are those of eager."""

import copy
import gc
import json
from collections.abc import Callable

import commlib  # before torch, which fixes its allocator

# isort: split
import torch
from torch import nn

from commlib import graph, ops
from tests.support.checks import raises

Check = Callable[[torch.device], None]


def main() -> None:
    device = commlib.init().device
    for check in (three_kinds, slots, whole_step, state, refused, unused_slots):
        check(device)
        print("right", check.__name__, flush=True)
    captured = graph.capture(block(device), outputs="copy")
    for _ in range(3):
        captured(torch.ones(64, 64, device=device))
    report = graph.report()
    print(report, flush=True)
    print("memory", json.dumps(report.memory), flush=True)
    captured.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    three_kinds(device)
    print("right after release", flush=True)
    commlib.shutdown()
    print("right at the end", flush=True)


def block(device: torch.device) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)


def three_kinds(device: torch.device) -> None:
    """Forward and backward of three sizes, in turn."""
    model = block(device)
    eager = copy.deepcopy(model)
    captured = graph.capture(model)
    for turn in range(4):
        for rows in (8, 32, 16):
            x = torch.randn(rows, 64, device=device, generator=seeded(device, turn))
            for one in (captured, eager):
                one.zero_grad(set_to_none=False)
                ops.all_reduce(one(x)).square().mean().backward()
            equal_grads(model, eager)


def slots(device: torch.device) -> None:
    """Three forwards wait for their backwards, which come in another order."""
    model = block(device)
    eager = copy.deepcopy(model)
    captured = graph.capture(model, outputs="copy", slots=3)
    for turn in range(4):
        for one in (captured, eager):
            one.zero_grad(set_to_none=False)
            inputs = [torch.full((8, 64), turn + i / 7, device=device) for i in range(3)]
            outs = [one(x) for x in inputs]
            for i in (1, 2, 0):
                outs[i].square().mean().backward()
        equal_grads(model, eager)


def whole_step(device: torch.device) -> None:
    """Gradients, backward and the optimizer in one graph."""
    model = block(device)
    eager = copy.deepcopy(model)

    def step_of(one: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = ops.all_reduce(one(x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    captured, plain = graph.capture(step_of(model)), step_of(eager)
    for turn in range(6):
        x = torch.randn(16, 64, device=device, generator=seeded(device, turn))
        assert torch.equal(captured(x), plain(x)), f"loss of step {turn}"
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs), "parameters"


def state(device: torch.device) -> None:
    """A function that binds what it makes, which a replay binds again."""
    cache: dict[str, torch.Tensor] = {}

    def f(x: torch.Tensor) -> torch.Tensor:
        cache["last"] = x * 3
        return cache["last"] + 1

    captured = graph.capture(f, outputs="copy")
    for turn in range(4):
        x = torch.full((1000,), float(turn), device=device)
        assert torch.equal(captured(x), x * 3 + 1)
        assert torch.equal(cache["last"], x * 3)


def refused(device: torch.device) -> None:
    """A capture that fails leaves all others as they are."""

    def reads(x: torch.Tensor) -> float:
        return (x * 2).sum().item()

    for _ in range(2):
        with raises(graph.GraphError, "item"):
            graph.capture(reads)(torch.ones(1000, device=device))
    eager = graph.capture(reads, on_fail="eager")
    assert [eager(torch.ones(10, device=device)) for _ in range(3)] == [20.0] * 3
    state(device)


def unused_slots(device: torch.device) -> None:
    """Graphs that are released before their first launch."""
    captured = graph.capture(block(device), outputs="copy", slots=3)
    for _ in range(3):
        captured(torch.ones(8, 64, device=device)).square().mean().backward()
    captured.reset()
    gc.collect()


def seeded(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def equal_grads(model: nn.Module, eager: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), "gradients"


if __name__ == "__main__":
    main()
