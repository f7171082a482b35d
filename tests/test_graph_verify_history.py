"""Verified calls whose arguments have a history that leads to weights of the function."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import commlib
from commlib import graph
from commlib.errors import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.hidden import HiddenCount
from tests.support.runs_on import runs_on
from tests.test_graph_verify import Hidden

Program = tuple[Callable[..., Any], Callable[..., torch.Tensor], list[torch.Tensor]]


def product(device: torch.device) -> Program:
    weight = torch.full((3,), 3.0, device=device, requires_grad=True)
    return (lambda x: x * weight), (lambda call, turn: call(weight * 2).sum()), [weight]


def same_tensor_twice(device: torch.device) -> Program:
    weight = torch.full((3,), 3.0, device=device, requires_grad=True)

    def loss(call: Any, turn: int) -> torch.Tensor:
        x = weight * (turn + 1)
        return call(x, x).sum()  # type: ignore[no-any-return]

    return (lambda x, y: x * y * weight), loss, [weight]


def the_weight_itself(device: torch.device) -> Program:
    weight = torch.full((3,), 3.0, device=device, requires_grad=True)
    return (lambda x: x * weight), (lambda call, turn: call(weight).sum()), [weight]


def tied_head(device: torch.device) -> Program:
    table = torch.nn.Embedding(7, 4).to(device)
    tokens = torch.tensor([0, 3, 3, 6], device=device)

    def loss(call: Any, turn: int) -> torch.Tensor:
        return F.cross_entropy(call(table(tokens)), tokens)

    return (lambda x: F.linear(x, table.weight)), loss, [table.weight]


def cell_in_a_loop(device: torch.device) -> Program:
    cell = torch.nn.GRUCell(4, 4).to(device)

    def loss(call: Any, turn: int) -> torch.Tensor:
        state = torch.zeros(2, 4, device=device)
        for step in range(3):
            state = call(torch.full((2, 4), step + turn + 1.0, device=device), state)
        return state.square().sum()

    return cell, loss, [*cell.parameters()]


def shared_layer(device: torch.device) -> Program:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(device)

    def loss(call: Any, turn: int) -> torch.Tensor:
        x = torch.ones(1, 3, 8, device=device).cumsum(-1)
        for _ in range(3):
            x = call(x)
        return x.square().sum()

    return layer, loss, [*layer.parameters()]


def twice(device: torch.device) -> Program:
    weight = torch.full((3,), 2.0, device=device, requires_grad=True)

    def loss(call: Any, turn: int) -> torch.Tensor:
        x = torch.full((3,), turn + 1.0, device=device, requires_grad=True)
        return call(call(x)).sum()  # type: ignore[no-any-return]

    return (lambda x: x * x * weight), loss, [weight]


def hooks(device: torch.device) -> Program:
    """One hook on the argument is the caller's, one the function's."""
    weight = torch.full((3,), 2.0, device=device, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda grad: grad * 3)
        return x * weight

    def loss(call: Any, turn: int) -> torch.Tensor:
        x = weight * 2
        x.register_hook(lambda grad: grad * (turn + 1))
        return call(x).sum()  # type: ignore[no-any-return]

    return f, loss, [weight]


def views(device: torch.device) -> Program:
    """Arguments are parts of one memory, which also is an output, and one of them a column."""
    weight = torch.full((3,), 2.0, device=device, requires_grad=True)

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * y * weight, y.view(1, 3), x

    def loss(call: Any, turn: int) -> torch.Tensor:
        both = torch.stack([weight * 3, weight * 5], 1)
        one, two, three = call(both[:, 0].contiguous(), both.t().contiguous()[1])
        total: torch.Tensor = one.sum() + two.square().sum() + three.sum()
        return total * both.sum()

    return f, loss, [weight]


PROGRAMS = (
    product,
    same_tensor_twice,
    the_weight_itself,
    tied_head,
    cell_in_a_loop,
    shared_layer,
    twice,
    hooks,
    views,
)
TURNS = 5


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Use another stream than the default one, where some versions of torch capture no history."""
    if device.type == "cpu":
        yield
        return
    default, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(default)
    with torch.cuda.stream(stream):
        yield
    default.wait_stream(stream)


def gradients(program: Program, capture: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Return the loss and the gradients of each turn."""
    fn, loss, weights = program
    call, results = capture(fn), []
    for turn in range(TURNS):
        for weight in weights:
            weight.grad = None
        value = loss(call, turn)
        value.backward()
        results += [value.detach().clone()]
        results += [x.grad.detach().clone() for x in weights if x.grad is not None]
    return results


@pytest.mark.parametrize("on_fail", ["raise", "eager"])
@pytest.mark.parametrize("verify", [True, "auto", False])
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: str(make.__name__))
@runs_on("unified_ranks")
def test_histories(comm: Any, make: Any, verify: Any, on_fail: Any) -> None:
    """Losses and gradients are those of eager code, and nothing becomes eager."""
    torch.manual_seed(1)
    program, graphs = make(comm.device), []

    def capture(fn: Any) -> Any:
        graphs.append(graph.capture(fn, verify=verify, on_fail=on_fail))
        return graphs[-1]

    with aside(comm.device):
        want = gradients(program, lambda fn: fn)
        actual = gradients(program, capture)
    for i, (one, other) in enumerate(zip(actual, want, strict=True)):
        assert_bits_equal(one, other, f"number {i}", atol=1e-4)  # three and more sums per weight
    (g,) = graphs
    assert_equal(len(g.eager), 0, "calls that stay eager")
    rows = graph.report(g)
    assert_equal(bool(sum(row["verified"] for row in rows)), bool(verify), "verified")
    assert sum(row["replays"] for row in rows) > 0


def second_order(y: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Return derivatives up to the third, which lead to each other."""
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    second.square().sum().backward()
    return [first, second]


def twice_retained(y: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    y.sum().backward(retain_graph=True)
    y.mul(2).sum().backward()
    return []


def by_parts(y: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Ask for one gradient after the other."""
    return [torch.autograd.grad(y.sum(), x, retain_graph=True)[0], y.sum().backward() or y]


def written(y: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    y.mul_(2)
    y.sum().backward()
    return []


@pytest.mark.parametrize("use", [second_order, twice_retained, by_parts, written])
@runs_on("unified_ranks")
def test_eager_results(comm: Any, use: Any) -> None:
    """Where the function counts, its result has the gradients of eager code, of all orders."""
    runs: list[list[Any]] = []
    for captured in (False, True):
        hidden, other = Hidden(), torch.full((3,), 5.0, device=comm.device, requires_grad=True)
        weight = torch.full((3,), 3.0, device=comm.device, requires_grad=True)

        def f(x: torch.Tensor, h: Any = hidden, w: Any = weight, v: Any = other) -> Any:
            return x, x.view(1, 3), (x**3 * w**2 if h.scale == 2.0 else x**2 * w * v)

        call: Any = graph.capture(f, on_fail="eager", outputs="copy") if captured else f
        rows: list[Any] = []
        for turn in range(4):
            weight.grad = other.grad = None
            hidden.scale = 2.0 if turn < 2 else 7.0
            x = weight * 2
            same, view, y = call(x)
            rows.append(same is x)
            y = y + view[0]
            if turn < 2:
                y.sum().backward()
            else:
                rows += use(y, x)
            rows += [y, weight.grad, other.grad]
        runs.append(rows)
        if captured:
            assert_equal(len(call.eager), 1, "calls that stay eager")
    for i, (want, got) in enumerate(zip(*runs, strict=True)):
        if isinstance(want, torch.Tensor):
            assert_bits_equal(got.detach(), want.detach(), f"number {i}", atol=1e-4)
        else:
            assert_equal(got, want, f"number {i}")


def test_names_bound_to_arguments() -> None:
    """A name that the function binds to its argument has the caller's tensor, not the leaf."""
    hidden, weight = Hidden(), torch.full((3,), 3.0, requires_grad=True)

    class State:
        last: Any = None

    state = State()

    def f(x: torch.Tensor) -> torch.Tensor:
        state.last = x
        return x * weight * hidden.scale

    g = graph.capture(f, on_fail="eager", verify=True)
    for scale in (2.0, 2.0, 2.0, 5.0):
        hidden.scale, weight.grad = scale, None
        x = weight * 2
        g(x).sum().backward()
        assert state.last is x
        assert_bits_equal(weight.grad, torch.full((3,), 12.0 * scale), f"scale {scale}")
    assert_equal(len(g.eager), 1, "calls that stay eager")


def test_noise() -> None:
    """A function that gives other bits each time counts, with its gradients."""
    numbers, weight = HiddenCount(), torch.full((3,), 3.0, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * weight
        ctypes.memset(y.data_ptr(), next(numbers) % 251 + 1, 1)
        return y

    g = graph.capture(f, verify=True)
    for turn in range(4):
        weight.grad = None
        g(weight * 2).sum().backward()
        assert_bits_equal(weight.grad, torch.full((3,), 12.0), f"turn {turn}")
    assert_equal(graph.report(g)[0]["repeats"], False)


@runs_on("unified_ranks")
def test_another_rank_raises(comm: Any) -> None:
    """The call of a rank whose peer raised counts, with its gradients."""
    hidden, weight = Hidden(), torch.full((3,), 3.0, device=comm.device, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = commlib.ops.all_reduce(x.detach())
        if hidden.scale == 5.0 and comm.rank == 1:
            raise ValueError("on one rank")
        return x * weight + total * 0

    g = graph.capture(f, outputs="copy")

    def step(turn: int) -> None:
        hidden.scale, weight.grad = 5.0 if turn == 1 else 2.0, None
        if turn == 1 and comm.rank == 1:
            with raises(ValueError, "on one rank"):
                g(weight * 2)
            return
        g(weight * 2).sum().backward()
        assert_bits_equal(weight.grad, torch.full((3,), 12.0), f"turn {turn}")

    with aside(comm.device):
        for turn in range(4):
            step(turn)


@runs_on("unified_ranks")
def test_pipelines(comm: Any) -> None:
    """The input of a pipeline comes from a weight of its layers; three microbatches wait."""
    layer = torch.nn.Linear(4, 4).to(comm.device)
    pipe = graph.pipeline([layer, torch.nn.Tanh()], slots=3)

    def step(call: Any, turn: int) -> list[Any]:
        layer.zero_grad()
        losses = [
            call(layer(torch.full((2, 4), turn + i / 4, device=comm.device))) for i in range(3)
        ]
        for loss in reversed(losses):
            loss.square().sum().backward()
        return [x.grad.clone() for x in layer.parameters() if x.grad is not None]

    for turn in range(5):
        want = step(lambda x: layer(x).tanh(), turn)
        for one, other in zip(step(pipe, turn), want, strict=True):
            assert_bits_equal(one, other, f"turn {turn}", atol=1e-4)
    assert_equal([(len(g.entries), len(g.eager)) for g in pipe.captured], [(1, 0)], "graphs")


@runs_on("unified_ranks")
def test_backwards_inside_that_lead_to_arguments(comm: Any) -> None:
    """A replay would leave out the gradients of arguments, and of what is before them."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)

    def adds_up(x: torch.Tensor) -> torch.Tensor:
        (x * 3).sum().backward(retain_graph=True)
        return x * weight

    def derives(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad((x * weight).sum(), weight, create_graph=True)
        return x * weight + grad

    cases: list[tuple[Callable[..., Any], Callable[[], torch.Tensor], float]] = [
        (adds_up, lambda: weight * 2, 10.0),
        (adds_up, lambda: weight.detach().requires_grad_(), 1.0),
        (derives, lambda: weight * 2, 8.0),
    ]
    for f, before, want in cases:
        weight.grad = torch.zeros_like(weight)
        g = graph.capture(f)
        with raises(GraphError, "a backward inside the function leads to argument tensor 0"):
            for _ in range(2):  # the first call of one that makes gradients is not captured
                g(before())
        assert_bits_equal(weight.grad, torch.zeros(3), "undone")
        tamed = graph.capture(f, on_fail="eager")
        for turn in range(3):
            weight.grad = torch.zeros_like(weight)
            tamed(before()).sum().backward()
            assert_bits_equal(weight.grad, torch.full((3,), want), f"turn {turn}")


@runs_on("unified_ranks")
def test_gradients_inside_by_arguments(comm: Any) -> None:
    """A derivative by an argument itself leads no further, and is captured."""

    def f(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return x + grad

    weight = torch.ones(3, device=comm.device, requires_grad=True)
    g = graph.capture(f, verify=True)
    for turn in range(4):
        weight.grad = None
        g(weight * 2).sum().backward()
        assert_bits_equal(weight.grad, torch.full((3,), 26.0), f"turn {turn}")
    assert_equal(len(g.entries), 1, "graphs")


def test_what_errors_are_called() -> None:
    """The program gets a GraphError under the name that it knows, with the result."""
    hidden = Hidden()
    g = graph.capture(lambda x: x * hidden.scale)
    g(torch.ones(3))
    hidden.scale = 5.0
    with pytest.raises(GraphError, match="the replay differs") as caught:
        g(torch.ones(3))
    assert_equal(type(caught.value), GraphError)
    assert caught.value.done
    assert_bits_equal(caught.value.result, torch.full((3,), 5.0))
