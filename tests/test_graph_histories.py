"""Captured functions and what autograd knows of tensors: writes without gradients, and views."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from commlib import graph
from commlib.graph import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

TURNS = range(4)


@pytest.mark.parametrize("size", [1, 2, 4])
@runs_on("unified_ranks")
def test_a_write_to_a_part_of_a_weight(comm: Any, size: int) -> None:
    """Without gradients a part of a weight may be written, before it is used with gradients."""
    start = torch.arange(1.0, 5.0, device=comm.device)
    weights = [start.clone().requires_grad_() for _ in range(2)]

    def function(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                weight[:size].mul_(0.5)
                weight[0] += 1
            return x * weight

        return step

    captured = graph.capture(function(weights[1]), outputs="copy")
    functions = (function(weights[0]), captured.__call__)
    for turn in TURNS:
        x = start + turn
        for fn, weight in zip(functions, weights, strict=True):
            fn(x).square().sum().backward()
            assert weight.grad is not None
        assert_bits_equal(weights[1], weights[0].detach(), f"turn {turn}")
        assert_bits_equal(weights[1].grad, weights[0].grad, f"turn {turn}, gradient")


@runs_on("unified_ranks")
def test_a_write_to_a_part_of_an_argument(comm: Any) -> None:
    """A caller without gradients may have a part of a tensor with gradients written."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        column = x[:, 0]
        column.add_(1)
        return column * 2

    captured = graph.capture(fn, outputs="copy")
    for turn in TURNS:
        both = [torch.full((2, 2), turn + 1.0, device=comm.device) for _ in range(2)]
        with torch.no_grad():
            results = [captured(both[0].requires_grad_()), fn(both[1].requires_grad_())]
        assert_bits_equal(results[0], results[1], f"turn {turn}")
        assert_bits_equal(both[0], both[1], f"turn {turn}, argument")


def first_half(weight: torch.Tensor) -> torch.Tensor:
    return weight.chunk(2)[0]


def second(weight: torch.Tensor) -> torch.Tensor:
    return weight.unbind()[1]


def rest(weight: torch.Tensor) -> torch.Tensor:
    return weight[1:]


@pytest.mark.parametrize("fn", [first_half, second, rest])
@runs_on("unified_ranks")
def test_a_part_of_a_weight(comm: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A returned part of a weight follows its optimizer, and gradients reach the weight."""
    weight = torch.arange(1.0, 5.0, device=comm.device).requires_grad_()
    captured = graph.capture(lambda x: (fn(weight), x * 1), outputs="copy")
    for turn in TURNS:
        part, _ = captured(torch.ones(1, device=comm.device))
        assert_bits_equal(part, fn(weight).detach(), f"turn {turn}")
        grads = torch.autograd.grad(part.square().sum(), [weight])
        want = torch.autograd.grad(fn(weight).square().sum(), [weight])
        assert_bits_equal(grads[0], want[0], f"turn {turn}, gradient")
        with torch.no_grad():
            weight.mul_(1.5)


@pytest.mark.parametrize("layout", [((3,), (0,)), ((3, 2), (1, 1)), ((2, 2), (3, 1))])
@runs_on("unified_ranks")
def test_a_view_of_an_argument_that_repeats_elements(
    comm: Any, layout: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """Each place of the argument has its own gradient; the last argument has gaps alone."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x[1:]

    captured = graph.capture(fn, outputs="copy")
    for turn in TURNS:
        x = (
            (torch.arange(5.0, device=comm.device) + turn)
            .as_strided(*layout)
            .detach()
            .requires_grad_()
        )
        number = torch.arange(1.0, x[1:].numel() + 1, device=comm.device).view_as(x[1:])
        grads = [torch.autograd.grad((each(x) * number).sum(), [x])[0] for each in (captured, fn)]
        assert_bits_equal(grads[0], grads[1], f"turn {turn}")


@pytest.mark.parametrize("name", ["unsqueeze_", "t_", "squeeze_"])
@runs_on("unified_ranks")
def test_another_shape_after_a_write(comm: Any, name: str) -> None:
    """A write does not make a tensor from outside one of the function's own."""
    buffer = torch.zeros(1, 3, device=comm.device)
    args = (0,) if name == "unsqueeze_" else ()

    @graph.capture
    def fn(x: torch.Tensor) -> torch.Tensor:
        buffer.add_(x)
        getattr(buffer, name)(*args)
        return x * 1

    with raises(GraphError, f"{name} can't be captured", f"use {name[:-1]}"):
        for _ in TURNS:
            fn(torch.ones(1, device=comm.device))


@runs_on("unified_ranks")
def test_a_write_to_a_saved_tensor_of_a_list(comm: Any) -> None:
    """Autograd refuses a backward whose saved tensor was written, also in a list of tensors."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        torch._foreach_mul_([y], 3.0)
        return y

    x = torch.zeros(2, device=comm.device, requires_grad=True)
    for each in (fn, graph.capture(fn)):
        with raises(RuntimeError, "modified by an inplace operation"):
            each(x).sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@runs_on("unified_ranks")
def test_an_argument_is_returned_without_gradients(
    comm: Any, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    """A computed argument that is returned as it is needs no backward of the function."""
    weight = torch.full((2,), 3.0, device=comm.device, requires_grad=True)
    captured = graph.capture(lambda x: (x, x * weight), outputs="copy")
    for turn in TURNS:
        x = torch.full((2,), turn + 1.0, device=comm.device, requires_grad=True) * 2
        with mode():
            same, product = captured(x)
        assert same is x
        assert_bits_equal(product, x.detach() * 3, f"turn {turn}")


@runs_on("unified_ranks")
def test_arguments_without_elements(comm: Any) -> None:
    """Two of them are two, though neither has an address."""
    captured = graph.capture(lambda a, b: (a + 1, a, b), outputs="copy", inputs="copy")
    for turn in TURNS:
        a, b = torch.ones(0, 3, device=comm.device), torch.ones(0, 3, device=comm.device)
        _, one, other = captured(a, b)
        assert_equal((one is a, other is b), (True, True), f"turn {turn}")
