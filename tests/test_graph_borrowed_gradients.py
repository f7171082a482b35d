"""gradients="borrow": the graph's own memory as gradients, and an error where that would show."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib import graph
from commlib.graph import GraphError
from tests.support import two_layers
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on
from tests.support.two_layers import model_on, rows, same_grads

STEPS = 6


def pair(device: torch.device, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    return two_layers.pair(device, "borrow", **options)


def grad_of(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return weight.grad


@runs_on("unified_ranks")
def test_training(comm: Any) -> None:
    """Steps that drop gradients, and steps that keep them and set them to zero."""
    for to_none in (True, False):
        eager, graphed, captured = pair(comm.device)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, graphed)]
        for turn in range(STEPS):
            for model in (eager, captured):
                model(rows(turn, comm.device)).square().sum().backward()
            same_grads(eager, graphed, f"turn {turn}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)


@runs_on("unified_ranks")
def test_forwards_in_flight(comm: Any) -> None:
    """Each forward that waits has its own memory; their gradients add up."""
    eager, graphed, captured = pair(comm.device)
    for turn in range(STEPS):
        for model in (eager, captured):
            outs = [model(rows(2 * turn + i, comm.device)).square().sum() for i in range(2)]
            for out in reversed(outs):
                out.backward()
            del outs, out
        same_grads(eager, graphed, f"turn {turn}")
        for module in (eager, graphed):
            module.zero_grad()


@runs_on("gpu_ranks")
def test_the_memory_is_the_graphs(comm: Any) -> None:
    """The same memory at every step, and reading it after the next forward raises."""
    _, graphed, captured = pair(comm.device, verify=False)
    weight = next(graphed.parameters())
    places = set[int]()
    for turn in range(STEPS):
        captured(rows(turn, comm.device)).square().sum().backward()
        if turn > 2:
            places.add(grad_of(weight).data_ptr())
        graphed.zero_grad()
    assert_equal(len(places), 1, "places of a gradient")

    captured(rows(0, comm.device)).square().sum().backward()
    borrowed, copied = grad_of(weight), grad_of(weight).clone()
    loss = captured(rows(1, comm.device)).square().sum()
    with raises(RuntimeError, "this gradient of a graph", "the call at", 'gradients="copy"'):
        borrowed.sum()
    with raises(RuntimeError, "this gradient of a graph"):
        loss.backward()  # would add to it
    assert copied.isfinite().all()
    graphed.zero_grad()

    captured(rows(2, comm.device)).square().sum().backward()
    borrowed = grad_of(weight)
    captured.reset()
    with raises(RuntimeError, "this gradient of a graph", "the release"):
        borrowed.sum()


@runs_on("gpu_ranks")
def test_backwards_of_one_forward(comm: Any) -> None:
    """They share memory, so that another one ends the gradients of the first."""
    model = model_on(comm.device)
    captured = graph.capture(lambda x: (model(x), model(x * 2)), gradients="borrow", verify=False)
    weight = next(model.parameters())
    captured(rows(0, comm.device))  # eager, and the capture
    for turn in range(STEPS):
        one, two = captured(rows(turn, comm.device))
        if turn % 2:
            one, two = two, one
        (borrowed,) = torch.autograd.grad(one.square().sum(), weight, retain_graph=True)
        torch.autograd.grad(two.square().sum(), weight)
        with raises(RuntimeError, "this gradient of a graph", "the next backward"):
            borrowed.sum()


class Handed(torch.autograd.Function):
    """The sum of squares, halved; its gradient is the very tensor that it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum() / 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x  # type: ignore[no-any-return]


@runs_on("unified_ranks")
def test_writing_to_a_gradient(comm: Any) -> None:
    """What the program does to one gradient changes no other one, and no parameter."""
    leaves = [rows(i, comm.device).requires_grad_() for i in range(3)]
    before = [leaf.detach().clone() for leaf in leaves]

    def sums(x: Tensor) -> Tensor:
        return ((leaves[0] + leaves[1]) * x).square().sum() + Handed.apply(leaves[2])  # type: ignore[no-untyped-call, no-any-return]

    captured = graph.capture(sums, gradients="borrow", verify=False)
    x = rows(3, comm.device)
    want = torch.autograd.grad(sums(x), leaves)
    for turn in range(3):
        captured(x).backward()
        for i, leaf in enumerate(leaves):
            assert leaf.grad is not None
            assert_bits_equal(leaf.grad, want[i], f"turn {turn}, gradient {i}")
            leaf.grad.mul_(3)
            leaf.grad = None
        for i, leaf in enumerate(leaves):
            assert_bits_equal(leaf.detach(), before[i], f"turn {turn}, parameter {i}")


@runs_on("cpu_ranks")
def test_copies_on_cpus(comm: Any) -> None:
    """Torch guards no memory there, so that gradients stay copies: one that is kept is right."""
    eager, graphed, captured = pair(comm.device)
    saved = []
    for turn in range(4):
        for model in (eager, captured):
            model(rows(turn, comm.device)).square().sum().backward()
        saved.append(
            [
                (x.grad, y.grad)
                for x, y in zip(eager.parameters(), graphed.parameters(), strict=True)
            ]
        )
        for module in (eager, graphed):
            module.zero_grad()
    for turn, grads in enumerate(saved):
        for expected, actual in grads:
            assert_bits_equal(actual, expected, f"turn {turn}, later")


def test_unknown_choice() -> None:
    with pytest.raises(
        GraphError, match="gradients='lend': expected 'accumulate', 'borrow' or 'copy'"
    ):
        graph.capture(lambda x: x, gradients="lend")  # type: ignore[call-overload]
