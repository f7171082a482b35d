"""Outputs of a captured function that are views of one memory."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch

from commlib import graph
from tests.support.checks import assert_bits_equal
from tests.support.runs_on import runs_on


def _chain(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * weight
    flat = y.view(-1)
    return y, flat, flat[2:5]


def _of_a_view(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    flat = (x * weight).view(9)
    return flat, flat[1:7], flat[2:5]


def _with_gaps(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * weight
    return y, y[::2, ::2], y.detach()[1:]


def _twice(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * weight
    y.view(9).mul_(2)
    flat = y.view(9)
    return y, flat, flat


def _without_history(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * weight
    with torch.no_grad():
        flat = y.view(9)
    return y, flat, y[0]


def _of_one_without_history(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * weight
    with torch.no_grad():
        flat = y.view(9)
    return y, flat[1:], flat[:4]


def _of_one_base(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * weight
    return y.view(9), y.t(), y.diagonal()


def _rows(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * weight
    return y[0], y[1], y[2]


def _with_a_dead_view(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * weight
    with torch.no_grad():
        flat = y.view(9)
    return y[:, :2], flat[:], y.t()


def _after_a_write(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * weight
    view = y.view_as(y)
    y.mul_(2)
    return y, view, view.unsqueeze(0)


def _copies(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    one, other = (x * weight).expand(2, 3, 3).unbind(0)
    return one, other, one[1:]


SHARING = (_chain, _of_a_view, _with_gaps, _twice, _without_history, _of_one_without_history)


def _written_to(
    outs: Sequence[torch.Tensor], weight: torch.Tensor, target: int
) -> list[torch.Tensor]:
    """Return the outputs after a write to one, and the gradient of the weight from before it."""
    losses = [out.square().sum() * (i + 1) for i, out in enumerate(outs) if out.requires_grad]
    grads = torch.autograd.grad(sum(losses), [weight]) if weight.requires_grad else []
    outs[target].detach().mul_(10)
    return [*grads, *(out.detach().clone() for out in outs)]


@pytest.mark.parametrize("fn", SHARING)
@runs_on("unified_ranks")
def test_outputs_that_share_memory(comm: Any, fn: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    """A write to an output is seen in views of its memory, in whichever order they are returned."""
    kinds: tuple[Literal["borrow", "copy"], ...] = ("borrow", "copy")
    for requires_grad, outputs in itertools.product((True, False), kinds):
        weight = (
            torch.arange(1.0, 10.0, device=comm.device).view(3, 3).requires_grad_(requires_grad)
        )
        for order in itertools.permutations(range(3)):

            def ordered(
                x: torch.Tensor, weight: torch.Tensor = weight, order: Any = order
            ) -> list[torch.Tensor]:
                results = fn(x, weight)
                return [results[i] for i in order]

            captured = graph.capture(ordered, outputs=outputs, verify=False)
            for target in (0, 0, 1, 2):
                x = torch.full((3, 3), target + 1.0, device=comm.device)
                actual, want = captured(x), ordered(x)
                pairs = zip(
                    _written_to(actual, weight, target),
                    _written_to(want, weight, target),
                    strict=True,
                )
                for number, (one, other) in enumerate(pairs):
                    text = f"{number} in order {order}, {outputs}, after a write to {target}"
                    assert_bits_equal(one, other, text)


def _gradients(outs: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the weight and of the outputs that lead to it; one has a hook."""
    leading = [
        out
        for out in outs
        if out.requires_grad
        and torch.autograd.grad(out.sum(), weight, retain_graph=True, allow_unused=True)[0]
        is not None
    ]
    leading[-1].register_hook(lambda grad: grad * 0.5)
    numbers = torch.linspace(0.1, 0.7, 9, device=weight.device)
    losses = [(out.flatten().square() * numbers[: out.numel()]).sum() for out in outs]
    return [*torch.autograd.grad(sum(losses), [weight, *leading])]


@pytest.mark.parametrize(
    "fn", [*SHARING, _of_one_base, _rows, _with_a_dead_view, _after_a_write, _copies]
)
@runs_on("unified_ranks")
def test_gradients_of_outputs_that_share_memory(
    comm: Any, fn: Callable[..., tuple[torch.Tensor, ...]]
) -> None:
    """Gradients of outputs and through them have the bits of eager ones, in any order of results.

    The numbers are such that another order of additions gives other bits.
    """
    device = comm.device
    weight = torch.linspace(0.3, 1.7, 9, device=device).view(3, 3).sin().requires_grad_()
    for order in itertools.permutations(range(3)):

        def ordered(x: torch.Tensor, order: Any = order) -> list[torch.Tensor]:
            results = fn(x, weight)
            return [results[i] for i in order]

        captured = graph.capture(ordered, outputs="copy", verify=False)
        for turn in range(3):
            x = torch.linspace(0.1, turn + 1.0, 9, device=device).view(3, 3)
            pairs = zip(
                _gradients(captured(x), weight), _gradients(ordered(x), weight), strict=True
            )
            for number, (actual, want) in enumerate(pairs):
                assert_bits_equal(actual, want, f"{number} in order {order}, turn {turn}")


def test_a_view_beyond_the_gaps_of_a_view() -> None:
    """Autograd drops what ``as_strided`` of a view gives to elements that the view leaves out."""
    weight = torch.arange(1.0, 10.0).view(3, 3).requires_grad_()

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * weight
        return y[:, :2].as_strided((4,), (1,), 0), y

    captured = graph.capture(fn, outputs="copy", verify=False)
    for turn in range(3):
        x = torch.full((3, 3), turn + 1.0)
        one, other = (
            torch.autograd.grad(sum(out.square().sum() for out in each(x)), [weight])
            for each in (captured, fn)
        )
        assert_bits_equal(one[0], other[0], f"turn {turn}")


@runs_on("unified_ranks")
def test_a_view_of_a_view_without_gradients(comm: Any) -> None:
    """A backward from it ends there, in a replay as in an eager call."""
    weight = torch.arange(1.0, 10.0, device=comm.device).view(3, 3).requires_grad_()

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * weight
        with torch.no_grad():
            first = y[:1]
        return first[0], y

    captured = graph.capture(fn, outputs="copy")
    for turn in range(3):
        row, y = captured(torch.full((3, 3), turn + 1.0, device=comm.device))
        row.backward(torch.ones_like(row))
        assert row.requires_grad and weight.grad is None, f"turn {turn}"
        assert_bits_equal(y[0], row, f"turn {turn}")
