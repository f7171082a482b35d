"""graph.capture: gradients, and state from before the capture."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commlib import graph, ops
from commlib.graph import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.hidden import HiddenCount
from tests.support.runs_on import runs_on


class _Past(torch.autograd.Function):
    """A step that holds something as long as its output's history lives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        ctx.token = token
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 3, None


@runs_on("unified_ranks")
def test_what_came_before(comm: Any) -> None:
    """A gradient to anything but an argument is refused; what led to arguments is released."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    hidden = weight * 2
    g = graph.capture(lambda x: x * hidden, outputs="copy")
    x = torch.ones(3, device=comm.device, requires_grad=True)
    with raises(GraphError, "(3,) tensor", "is not an argument"):
        g(x)
    detached = graph.capture(lambda x: x * hidden.detach(), outputs="copy")
    for _ in range(2):
        assert_bits_equal(detached(x), hidden.detach())
    double = graph.capture(lambda x: x * 2, outputs="copy")
    token = torch.zeros(1)
    past, token_ref = _Past.apply(weight, token), weakref.ref(token)  # type: ignore[no-untyped-call]
    for _ in range(2):
        double(past)
    del past, token
    gc.collect()
    assert_equal(token_ref() is None, True, "the history of an argument is gone")


@runs_on("unified_ranks")
def test_lazily_made_state(comm: Any) -> None:
    """What the first call makes, later ones go on from; what a later one makes is refused."""
    state: list[torch.Tensor] = []

    def momentum(x: torch.Tensor) -> torch.Tensor:
        if not state:
            state.append(x.clone())
        else:
            state[0].mul_(0.5).add_(x)
        return state[0] + 0

    x = torch.ones(3, device=comm.device)
    want = [torch.full((3,), value) for value in (1.0, 1.5, 1.75, 1.875)]
    variants: tuple[Any, ...] = ({}, {"warmup": 1}, {"on_fail": "eager"}, {"warmup": 3})
    for options in (*variants, {"first": "warmup", "warmup": 1}):
        state.clear()
        g = graph.capture(momentum, outputs="copy", **options)
        for value in want:
            assert_bits_equal(g(x), value, f"{options}")
        assert_equal(len(g.entries), 1, f"graphs with {options}")
    calls = HiddenCount()

    def late(x: torch.Tensor) -> torch.Tensor:
        return momentum(x) if next(calls) > 1 else x + 0

    state.clear()
    with raises(GraphError, "the length of a list", "(0, then 1)", "a replay runs no Python"):
        graph.capture(late)(x)
    assert_equal(state, [], "as before")
    calls = HiddenCount()
    g = graph.capture(late, outputs="copy", on_fail="eager")
    for value in (want[0], *want):
        assert_bits_equal(g(x), value, "eager until the list is made")
    assert_equal((len(g.entries), g.entries.replays), (1, 2), "calls with the list that was made")


def random_order(count: int, turn: int) -> list[int]:
    order = list(range(count))
    return order[turn % count :] + order[: turn % count]


@pytest.mark.parametrize("flights", [1, 3])
@runs_on("unified_ranks")
def test_gradients(comm: Any, flights: int) -> None:
    """Several outputs, unused and integer ones, and several forwards before their backwards."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.spare = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Any:
            y = ops.all_reduce(torch.tanh(self.inner(x))) * scale
            return {"y": y, "n": (y > 0).sum(), "x": x * 3}

    def train(call: Any, module: Any) -> list[Any]:
        results = []
        for turn in range(3):
            inputs = [
                torch.linspace(turn, i + 1, 12, device=comm.device).view(3, 4).requires_grad_()
                for i in range(flights)
            ]
            outs = [call(x * 1, scale=0.5) for x in inputs]
            for i in random_order(flights, turn):
                (outs[i]["y"].sum() + (outs[i]["x"] ** 2).sum()).backward()
            results += [x.grad for x in inputs]
            results.append(module.inner.weight.grad.clone())
            results.append(outs[-1]["n"].clone())
            del outs  # and with it the nodes: their slots are free
            assert_equal(module.spare.weight.grad, None, "gradient of what is not used")
        return results

    torch.manual_seed(5)
    module = Layer().to(comm.device)
    plain = train(module, module)
    module.zero_grad(set_to_none=True)
    captured = graph.capture(module)
    captured(torch.ones(3, 4, device=comm.device, requires_grad=True) * 1, scale=0.5)
    for turn, (one, want) in enumerate(zip(train(captured, module), plain, strict=True)):
        assert_bits_equal(one, want, f"tensor {turn}")
    (slots,) = captured.entries.values()
    assert_equal(len(slots.parts), flights, "slots")
    assert_equal({row["replays"] for row in graph.report(captured)}, {3}, "replays of each slot")


@runs_on("unified_ranks")
def test_gradients_that_are_used_up(comm: Any) -> None:
    """A function that uses gradients up, as step() and zero_grad() do, finds the next ones."""

    def train(captured: Callable[..., Any]) -> list[torch.Tensor]:
        weight = torch.ones(3, device=comm.device, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        call, weights = captured(step), []
        for turn in range(6):
            (weight * turn).sum().backward()
            call()
            assert_equal(weight.grad, None, f"turn {turn}")
            weights.append(weight.detach().clone())
        return weights

    pairs = zip(train(graph.capture), train(lambda f: f), strict=True)
    for turn, (one, want) in enumerate(pairs):
        assert_bits_equal(one, want, f"turn {turn}")


@runs_on("unified_ranks")
def test_grad_is_none_at_first(comm: Any) -> None:
    """A backward inside the function may be the first that gives gradients."""

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> None:
            (self.weight * x).sum().backward()

    module = Step().to(comm.device)
    x = torch.ones(3, device=comm.device)
    f = graph.capture(module)
    for turn in range(1, 6):
        f(x)
        assert_bits_equal(module.weight.grad, torch.full((3,), float(turn)), f"turn {turn}")
    assert_equal(len(f.entries), 1, "with gradients to add to")
    for turn in range(1, 9):
        if turn % 2:
            module.zero_grad(set_to_none=True)
        f(x * turn)
        assert_bits_equal(
            module.weight.grad, x * (turn if turn % 2 else 2 * turn - 1), f"turn {turn}"
        )
    assert_equal(len(f.entries), 2, "with gradients, and without")


@runs_on("unified_ranks")
def test_expanded_gradients(comm: Any) -> None:
    """A sum right after the call sends one number to all elements, which kernels add up otherwise.

    The numbers of elements are such that the order of additions shows.
    """
    graphed = torch.nn.BatchNorm1d(6).to(comm.device)
    eager, generator = copy.deepcopy(graphed), torch.Generator().manual_seed(5)
    captured = graph.capture(graphed, verify=2)
    reduced: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.sum,
        lambda out: out.sum(0)[2],
        lambda out: (out * out).sum(),
    ]
    for turn in range(12):
        x = torch.randn(50, 6, generator=generator).to(comm.device)
        grads = []
        for call, module in ((captured, graphed), (eager, eager)):
            leaf = x.clone().requires_grad_()
            reduced[turn % 3](call(leaf)).backward()
            grads.append([leaf.grad, *(weight.grad for weight in module.parameters())])
            module.zero_grad()
        for actual, expected in zip(*grads, strict=True):
            assert_bits_equal(actual, expected, f"turn {turn}")


@runs_on("unified_ranks")
def test_forms_of_gradients(comm: Any) -> None:
    """Which dimensions are expanded counts, and no other stride: it could be new in each step."""
    weight = torch.arange(5.0, device=comm.device).requires_grad_()
    captured = graph.capture(lambda x: x * weight)
    x = torch.arange(20.0, device=comm.device).view(2, 2, 5)
    windows = torch.arange(6.0, device=comm.device).as_strided(x.size(), (0, 1, 1))
    columns = [torch.ones(5, wide, device=comm.device)[:, 0] for wide in range(1, 9)]
    captured(x)  # eager, and the capture
    for grad in (windows, *(column.expand(x.size()) for column in columns)):
        (by_weight,) = torch.autograd.grad(captured(x), weight, grad)
        assert_equal(by_weight.tolist(), (x * grad).sum((0, 1)).tolist(), f"{grad.stride()}")
    slots: Any = next(iter(captured.entries.values()))
    assert_equal(
        len(slots.slots[0]._backwards), 3, "graphs: dense, and expanded along one or two dimensions"
    )


@runs_on("unified_ranks")
def test_expanded_gradients_on_one_rank(comm: Any) -> None:
    """Ranks may have other losses: each makes the collectives of one backward, no more."""
    weight = torch.arange(6.0, device=comm.device).requires_grad_()

    def summed(x: torch.Tensor) -> torch.Tensor:
        return ops.all_reduce(x * weight)

    captured = graph.capture(summed, verify=False)
    for turn in range(4):
        grads: list[torch.Tensor] = []
        for call in (captured, summed):
            out = call(torch.ones(4, 6, device=comm.device) * (turn + 1))
            loss = out.sum() if (comm.rank + turn) % 2 else out.square().sum()
            grads += torch.autograd.grad(loss, weight)
        assert_bits_equal(*grads, f"turn {turn}")


class Stops(torch.autograd.Function):
    """Twice its argument, with no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        return None


@runs_on("unified_ranks")
def test_no_gradient_comes(comm: Any) -> None:
    """A backward that reaches a captured call without a gradient leaves its leaves alone."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    captured = graph.capture(lambda x: x * weight)
    for turn in range(3):
        out = captured(torch.ones(3, device=comm.device))
        (Stops.apply(out).sum() + weight.sum()).backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        assert_equal(weight.grad.tolist(), [turn + 1.0] * 3, f"turn {turn}")


@runs_on("unified_ranks")
def test_kept_gradients(comm: Any) -> None:
    """Gradients that the program keeps are not overwritten by the next backward."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    f = graph.capture(lambda x: weight * x)
    grads: list[Any] = []
    for turn in range(4):
        x = torch.full((3,), turn + 1.0, device=comm.device)
        weight.grad = None
        f(x).sum().backward()
        grads.append(weight.grad)
    for turn, grad in enumerate(grads):
        assert_bits_equal(grad, torch.full((3,), turn + 1.0), f"turn {turn}")
    weight.grad = None
    for _ in range(3):
        f(torch.ones(3, device=comm.device)).sum().backward()
    assert_bits_equal(weight.grad, torch.full((3,), 3.0), "accumulated")
