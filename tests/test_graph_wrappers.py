"""Captured functions that use wrappers: DTensor parameters, gradients and outputs."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from commlib import graph
from commlib.errors import GraphError
from tests.support.checks import assert_equal, raises
from tests.support.device_meshes import mesh_of
from tests.support.runs_on import runs_on


def sharded(comm: Any) -> torch.nn.Module:
    """Return a module whose two layers are split over all ranks."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)]
    model = torch.nn.Sequential(*layers).to(comm.device)
    mesh = mesh_of(comm)
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def trained(comm: Any, of: Callable[..., Any], captured: Callable[[Any], Any]) -> list[Any]:
    """Train for some turns; returns losses and weights."""
    model = sharded(comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    turn = of(model, optimizer, captured)
    losses = [turn(torch.full((4, 8), i + 1.0, device=comm.device)) for i in range(6)]
    return [*losses, *(p.to_local().clone() for p in model.parameters())]  # type: ignore[attr-defined]


def module(model: Any, optimizer: Any, captured: Callable[[Any], Any]) -> Any:
    """Return a turn of which the module alone is captured."""
    call = captured(model)

    def turn(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        value: torch.Tensor = loss.detach().clone()
        return value

    return turn


def step(model: Any, optimizer: Any, captured: Callable[[Any], Any]) -> Any:
    """Return a turn that is captured as a whole."""

    def whole(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        value: torch.Tensor = loss.detach()
        return value

    call = captured(whole)
    return lambda x: call(x).clone()


@pytest.mark.parametrize("of", [module, step])
@runs_on("unified_ranks")
def test_tensor_parallel(comm: Any, of: Callable[..., Any]) -> None:
    """A module with DTensor parameters has the bits of eager code, and replays."""
    graphs: list[Any] = []

    def captured(fn: Any) -> Any:
        graphs.append(graph.capture(fn))
        return graphs[-1]

    want = trained(comm, of, lambda fn: fn)
    equal = [torch.equal(a, b) for a, b in zip(trained(comm, of, captured), want, strict=True)]
    assert_equal(equal, [True] * len(want), "bits")
    assert_equal(graph.report(graphs[0])[0]["replays"] > 1, True, "replays")


@runs_on("unified_ranks")
def test_outputs(comm: Any) -> None:
    """A DTensor that is returned is one again at each replay; one with a gradient is refused."""
    mesh = mesh_of(comm)
    weight = torch.arange(float(comm.size), device=comm.device)
    held = DTensor.from_local(weight, mesh, [Replicate()]).redistribute(placements=[Shard(0)])

    def f(x: torch.Tensor) -> Any:
        return held * float(3), x + held.full_tensor()

    g = graph.capture(f, outputs="copy")
    for turn in range(5):
        sharded, full = g(torch.full((comm.size,), float(turn), device=comm.device))
        assert_equal((type(sharded), sharded.placements), (DTensor, (Shard(0),)), f"turn {turn}")
        assert_equal(sharded.to_local().tolist(), [3.0 * comm.rank], f"turn {turn}")
        assert_equal(full.tolist(), [turn + i for i in range(comm.size)], f"turn {turn}")
    assert_equal(graph.report(g)[0]["replays"], 4, "replays")
    held.requires_grad_()
    with raises(GraphError, "an output is a DTensor that requires grad", "to_local()"):
        graph.capture(lambda x: held * x)(2.0)
    with raises(GraphError, "tensor 0 of the arguments is a DTensor", "to_local()"):
        graph.capture(lambda x: x * 2)(held.detach())
    dist.barrier()


class Quantized(torch.Tensor):
    """A weight of whole numbers and their scale, as quantization libraries have them."""

    numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=scale.dtype, device=numbers.device
        )

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, held: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(held["numbers"], held["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        plain = [x.numbers * x.scale if isinstance(x, cls) else x for x in args]
        return func(*plain, **(kwargs or {}))


@runs_on("unified_ranks")
def test_quantized_weights(comm: Any) -> None:
    """A weight that is a wrapper is read where its parts are, and can be returned."""
    numbers = torch.arange(6, dtype=torch.int8, device=comm.device).view(2, 3)
    weight = Quantized(numbers, torch.tensor(0.5, device=comm.device))

    def f(x: torch.Tensor) -> Any:
        return x @ weight, weight

    g = graph.capture(f, outputs="copy")
    for turn in range(6):
        x = torch.full((1, 2), turn + 1.0, device=comm.device)
        actual, same_weight = g(x)
        want = x @ (numbers * weight.scale)
        assert_equal(
            (torch.equal(actual, want), type(same_weight)), (True, Quantized), f"turn {turn}"
        )
        numbers.add_(1)
        weight.scale.mul_(2)
    assert_equal(graph.report(g)[0]["replays"], 5, "replays")


@runs_on("unified_ranks")
def test_placements_of_gradients(comm: Any) -> None:
    """A gradient that is held otherwise is another kind of call."""
    mesh = mesh_of(comm)
    zeros = torch.zeros(4, device=comm.device)
    held = DTensor.from_local(zeros, mesh, [Replicate()], run_check=False)
    weight = torch.nn.Parameter(held)

    def f() -> Any:
        return weight.grad.full_tensor() * 1.0  # type: ignore[union-attr]

    g = graph.capture(f, outputs="copy", verify=False)
    for turn in range(8):
        part = torch.full((4,), turn + 1.0, device=comm.device)
        placement: Any = Replicate() if turn < 4 else Partial()
        weight.grad = DTensor.from_local(part, mesh, [placement], run_check=False)
        want = (turn + 1.0) * (1 if turn < 4 else comm.size)
        assert_equal(g().tolist(), [want] * 4, f"turn {turn}")
    assert_equal(sum(row["replays"] for row in graph.report(g)) > 2, True, "replays")
    weight.grad = None
    with raises(GraphError, "an output is a DTensor that requires grad", "to_local()"):
        graph.capture(lambda x: SimpleNamespace(y=weight * x))(2.0)
