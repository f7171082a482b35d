"""Eager parts: what they return, and what they write to, in replays and in verified calls."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.nn import Linear, Sequential, Tanh

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.backends.base import CpuBackend
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

Part = Callable[..., Any]
Function = Callable[[torch.Tensor], Any]
VALUES = [1.0, 2.0, -3.0, 4.0, float("nan"), 1.0]


def _same_as_eager(comm: Any, fn: Function, *, verify: bool) -> None:
    """Compare results and arguments of a captured function with those of the function."""
    captured = graph.capture(fn, outputs="copy", verify=verify)
    held = []  # so that each argument has its own memory
    for number, value in enumerate(VALUES):
        x, y = (torch.full((3,), value, device=comm.device) for _ in range(2))
        held.append(x)
        with torch.no_grad():
            expected, actual = fn(y), captured(x)
        assert_bits_equal(actual, expected, f"call {number}")
        assert_bits_equal(x, y, f"the argument of call {number}")


# -- what a part returns ---------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False])
@runs_on("unified_ranks")
def test_another_tensor_of_the_program(comm: Any, verify: bool) -> None:
    """A part that returns another of the program's tensors is refused, and all keep their bits."""
    experts = [torch.full((3,), 1.0, device=comm.device), torch.full((3,), 2.0, device=comm.device)]
    pick: Part = graph.eager(lambda score: experts[int(score.argmax())])
    captured = graph.capture(lambda x, s: x * pick(s), outputs="copy", verify=verify)
    x, scores = torch.ones(3, device=comm.device), torch.tensor([1.0, 0.0], device=comm.device)
    for _ in range(3):
        assert_bits_equal(captured(x, scores), x, "the first")
    scores.copy_(scores.flip(0))
    with raises(GraphError, "<lambda>, an eager part, returns another tensor", "clone()"):
        captured(x, scores)
    assert_equal([float(each[0]) for each in experts], [1.0, 2.0], "the program's tensors")


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("place", ["an argument", "made by the function"])
@runs_on("unified_ranks")
def test_its_argument_or_another_tensor(comm: Any, place: str, verify: bool) -> None:
    """A part that returns its argument at the capture, and a new tensor later, is refused."""
    limit: Part = graph.eager(lambda x: x if float(x.max()) < 5 else x.clamp(max=5))

    def argument(x: torch.Tensor) -> Any:
        return limit(x) + x

    def made(x: torch.Tensor) -> Any:
        y = x * 2
        return y * (limit(y) + 1)

    fn = argument if place == "an argument" else made
    captured = graph.capture(fn, verify=verify, outputs="copy")
    x = torch.ones(3, device=comm.device)
    for _ in range(3):
        assert_bits_equal(captured(x), fn(x), "the argument itself")
    x.fill_(10)
    with raises(GraphError, "an eager part, returns another tensor", "clone()"):
        captured(x)
    assert_equal(x.tolist(), [10.0] * 3, "the argument")


@runs_on("unified_ranks")
def test_what_a_part_passes_on(comm: Any) -> None:
    """A function goes on with a tensor that a part has looked at; gradients flow past the part."""
    sums: list[float] = []
    look: Part = graph.eager(lambda x: sums.append(float(x.sum())))
    through: Part = graph.eager(lambda x: x if float(x.sum()) < 1e9 else None)
    torch.manual_seed(0)
    body = Sequential(Linear(3, 3), Tanh()).to(comm.device)
    head = Linear(3, 2).to(comm.device)
    eager = copy.deepcopy(Sequential(body, head))  # the capture needs nodes that no call has made

    def looked(x: torch.Tensor) -> Any:
        h = body(x)
        look(h)
        return head(h)

    def passed(x: torch.Tensor) -> Any:
        return head(through(body(x)))

    for fn in (looked, passed):
        captured = graph.capture(fn, outputs="copy")
        for number in range(5):
            x = torch.full((2, 3), 0.5 * number, device=comm.device)
            expected, actual = eager(x), captured(x)
            assert_bits_equal(actual, expected, f"call {number}")
            weights = [*body.parameters(), *head.parameters()]
            found_grads = torch.autograd.grad(actual.sum(), weights)
            grads = torch.autograd.grad(expected.sum(), [*eager.parameters()])
            for one, other in zip(found_grads, grads, strict=True):
                assert_bits_equal(one, other, f"a gradient of call {number}")
    assert_equal(len(sums), 5, "calls of the part")


@pytest.mark.parametrize("verify", [True, False])
@runs_on("unified_ranks")
def test_arrays(comm: Any, verify: bool) -> None:
    """A part may return tensors over arrays of NumPy: the graph has copies of them."""
    table = np.arange(6.0).reshape(2, 3)
    row: Part = graph.eager(lambda x: torch.from_numpy(table[int(x[0]) % 2]))
    captured = graph.capture(lambda x: row(x).to(x.device) + x, outputs="copy", verify=verify)
    for value in (0.0, 1.0, 2.0, 3.0, 0.0):
        x = torch.full((3,), value, dtype=torch.float64, device=comm.device)
        expected = torch.from_numpy(table[int(value) % 2] + value).to(comm.device)
        assert_bits_equal(captured(x), expected, f"row {value}")
    assert_equal(table.tolist(), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], "the array")


def _twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * float(x.isfinite().all())
    return y, y


def _view(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.stack([x, x * float(x.isfinite().all())])
    return y, y[0]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("part", [_twice, _view])
@runs_on("unified_ranks")
def test_writes_to_what_a_part_returned(comm: Any, part: Part, verify: bool) -> None:
    """A function writes to a part's result; a second result over the same memory sees it."""
    outside: Part = graph.eager(part)

    def fn(x: torch.Tensor) -> Any:
        one, other = outside(x * 2)
        one.add_(1)
        return one * other

    _same_as_eager(comm, fn, verify=verify)


# -- what a part writes to -------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False])
@runs_on("unified_ranks")
@patch.object(CpuBackend, "copies_arguments", new=False)  # as on a GPU
def test_writes_to_views_that_a_part_passes_on(comm: Any, verify: bool) -> None:
    """A write to a view that a part returns reaches what it is a view of, in a second capture."""
    flat: Part = graph.eager(lambda x: x.view(-1)[1:])

    def fn(x: torch.Tensor) -> Any:
        h = x + 1
        flat(h).add_(1)
        flat(x).mul_(2)
        return h * x

    _same_as_eager(comm, fn, verify=verify)
    total = torch.zeros(3, device=comm.device)
    all_of_it: Part = graph.eager(lambda: total.view(-1))
    captured = graph.capture(lambda x: all_of_it().add_(x) * 1, outputs="copy", verify=verify)
    inputs = [torch.full((3,), float(number), device=comm.device) for number in range(6)]
    for number, x in enumerate(inputs):
        expected = sum(inputs[:number], x)
        assert_bits_equal(captured(x), expected, f"call {number}")
        assert_bits_equal(total, expected, f"the program's tensor after call {number}")


@pytest.mark.parametrize("verify", [True, False])
@runs_on("unified_ranks")
def test_expanded_results(comm: Any, verify: bool) -> None:
    """A part may return a tensor whose elements share memory."""
    mean: Part = graph.eager(lambda x: x.mean().expand(3))
    _same_as_eager(comm, lambda x: x - mean(x), verify=verify)


@pytest.mark.parametrize("verify", [True, False])
@runs_on("unified_ranks")
def test_expanded_arguments(comm: Any, verify: bool) -> None:
    """A part may write to memory of which it also has an expanded view."""

    @graph.eager
    def write(total: torch.Tensor, repeated: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return repeated * 2

    def function(x: torch.Tensor) -> torch.Tensor:
        total = x * 2
        return write(total, total[:1].expand(3)) + total

    _same_as_eager(comm, function, verify=verify)


def _always(x: torch.Tensor) -> None:
    x.nan_to_num_().clamp_(max=float(x.sum() > 0) + 2)


def _sometimes(x: torch.Tensor) -> None:
    if not x.isfinite().all():
        x.nan_to_num_()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("place", ["an argument", "made by the function", "outside"])
@pytest.mark.parametrize("part", [_always, _sometimes])
@runs_on("unified_ranks")
def test_writes_of_a_part(comm: Any, part: Part, place: str, verify: bool) -> None:
    """A part writes to what the function gave it, in each call or in some."""
    write, buffer = graph.eager(part), torch.zeros(3, device=comm.device)

    def argument(x: torch.Tensor) -> torch.Tensor:
        write(x)
        return x + 1

    def made(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        write(y)
        return y + 1

    def outside(x: torch.Tensor) -> torch.Tensor:
        buffer.copy_(x)
        write(buffer)
        return buffer + 1

    functions = {"an argument": argument, "made by the function": made, "outside": outside}
    _same_as_eager(comm, functions[place], verify=verify)


@pytest.mark.parametrize("verify", [True, False])
@runs_on("unified_ranks")
def test_gradients_that_a_part_clips(comm: Any, verify: bool) -> None:
    """A training step whose part clips the gradients has the bits of the eager step."""

    def run(*, captured: bool) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        layer = Linear(3, 3).to(comm.device)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        norms: list[float] = []
        clip: Part = graph.eager(
            lambda: norms.append(
                float(torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1, foreach=True))
            )
        )

        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            clip()
            optimizer.step()
            return loss.detach()

        train: Any = graph.capture(step, outputs="copy", verify=verify) if captured else step
        losses = [train(torch.full((2, 3), 0.5 * i, device=comm.device)) for i in range(6)]
        return norms, [*losses, *layer.parameters()]

    norms, expected = run(captured=False)
    found_norms, actual = run(captured=True)
    assert_equal(found_norms, norms, "norms")
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_bits_equal(one, other, f"loss or weight {number}")
