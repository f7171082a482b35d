"""graph.backend.apply: memory that values share across a cut, where a part would return copies."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from commlib import graph
from commlib.graph import GraphError
from tests.support.checks import assert_equal, raises
from tests.support.cuts import cut

CALLS = 4
OTHER_LAYOUT = "its inputs have other shapes or strides than the examples"
LOST = "is written after a cut, and shares its memory with"


def overlapping(x: Tensor, y: Tensor) -> Any:
    h = x * 1
    p, q = h[:2], h[1:]
    a = cut(y)
    p.add_(10)
    return a, q * 1


def gaps(x: Tensor, y: Tensor) -> Any:
    h = (x * 1)[:, :1]
    v, a = h[1:], cut(y)
    v.add_(10)
    return a, h * 1


def conjugates(x: Tensor, y: Tensor) -> Any:
    c = torch.view_as_complex(x * 1)
    d, a = c.conj(), cut(y)
    c.mul_(2)
    return a, torch.view_as_real(d.resolve_conj())


def real_parts(x: Tensor, y: Tensor) -> Any:
    c = torch.view_as_complex(x * 1)
    d, a = torch.view_as_real(c), cut(y)
    c.mul_(2)
    return a, d * 1


def other_bits(x: Tensor, y: Tensor) -> Any:
    c = x * 1
    d, a = c.detach().view(torch.int32), cut(y)
    c.mul_(2)
    return a, d + 0


def bits_of_an_input(x: Tensor, y: Tensor) -> Any:
    d, a = x.detach().view(torch.int32), cut(y)
    x.mul_(2)
    return a, d + 0


def in_place_function(x: Tensor, y: Tensor) -> Any:
    h = x - 2
    p, q = h[:2], h[1:]
    a = cut(y)
    torch.nn.functional.relu(p, inplace=True)
    return a, q * 1


def plain_view(x: Tensor, y: Tensor) -> Any:
    h = x * 1
    v, a = h[1:], cut(y)
    h.add_(10)
    return a, v * 1


def view_of_an_input(x: Tensor, y: Tensor) -> Any:
    v, a = x.t(), cut(y)
    v.add_(10)
    return a, x * 1


def expanded(x: Tensor, y: Tensor) -> Any:
    h = x * 1
    v, a = h[:, :1].expand(3, 8), cut(y)
    h.add_(10)
    return a, v * 1


def windows(x: Tensor, y: Tensor) -> Any:
    h = x * 1
    v, a = h.unfold(0, 2, 1), cut(y)
    h.add_(10)
    return a, v * 1


def view_before_its_base(x: Tensor, y: Tensor) -> Any:
    h = x * 1
    v = h.view(-1)
    a = cut(v)
    h.add_(10)
    return a, v * 1 + y[0]


def chunks(x: Tensor, y: Tensor) -> Any:
    h = x * 1
    p, a = h.split(1)[0], cut(y)
    h.add_(10)
    return a, p * 1


def written_before(x: Tensor, y: Tensor) -> Any:
    h = x * 1
    p, q = h[:2], h[1:]
    p.add_(10)
    return cut(y), p * 1, q * 1


def one_value(x: Tensor, y: Tensor) -> Any:
    h = x * 1
    v = h.view(-1)
    a = cut(v)
    h.add_(10)
    return a, h * y[0]


LOSES: list[Callable[..., Any]] = [
    *(overlapping, gaps, conjugates, real_parts, other_bits, bits_of_an_input),
    in_place_function,
]
GRADIENTS = [expanded, windows, view_before_its_base, chunks]  # where the memory is lost with them
STAYS = [plain_view, view_of_an_input, written_before, one_value]


def outcome(fn: Callable[..., Any], turn: int, *, grad: bool, turned: bool) -> Any:
    """Return results and gradients of a call, or the error."""
    x = torch.arange(6.0).view(3, 2) + turn
    x = torch.arange(6.0).view(2, 3).t() if turned else x
    y = (torch.ones(2) + turn).requires_grad_(grad)
    leaf = x.clone().requires_grad_(grad)
    try:
        results = fn(leaf * 1 if grad else leaf, y)
        if grad:
            loss: Any = sum(x.square().sum() for x in results if x.requires_grad)
            loss.backward()
    except RuntimeError as error:
        return str(error)[:40]
    grads = [None if each.grad is None else each.grad.tolist() for each in (leaf, y)]
    return [x.tolist() for x in results], grads, leaf.tolist()


def rows_of(
    f: Callable[..., Any], *, grad: bool, turned: bool = False
) -> tuple[list[str], list[int]]:
    """Compare calls with eager ones; return the reasons for eager parts, and counts of replays."""
    replayed = graph.backend.apply(symbolic_trace(f), [torch.ones(3, 2), torch.ones(2)])
    for turn in range(CALLS):
        expected = outcome(f, turn, grad=grad, turned=turned)
        assert_equal(outcome(replayed, turn, grad=grad, turned=turned), expected, f"turn {turn}")
    rows = graph.report(replayed)
    eager = [row["eager"] for row in rows if row["eager"]]
    return eager, [row["replays"] for row in rows if not row["eager"]]


@pytest.mark.parametrize(
    ("f", "grad"),
    [(f, False) for f in LOSES] + [(f, True) for f in LOSES if f is not bits_of_an_input],
)
def test_writes_that_copies_would_lose(f: Any, grad: bool) -> None:
    """Autograd itself rejects other bits of an input."""
    (reason,), replays = rows_of(f, grad=grad)
    assert LOST in reason
    assert_equal(replays, [], "replays")


@pytest.mark.parametrize("f", GRADIENTS)
def test_writes_that_are_lost_with_gradients(f: Any) -> None:
    eager, replays = rows_of(f, grad=True)
    assert LOST in eager[-1]
    assert_equal(replays, [], "replays")
    eager, replays = rows_of(f, grad=False)
    assert_equal(any(LOST in reason for reason in eager), False, "reasons without gradients")
    assert_equal(replays, [CALLS - 1] * len(replays), "replays")


@pytest.mark.parametrize("f", STAYS)
def test_views_that_stay_views(f: Any) -> None:
    eager, replays = rows_of(f, grad=False)
    assert_equal(any(LOST in reason for reason in eager), False, "reasons")
    assert_equal({*replays}, {CALLS - 1}, "replays")


def test_strides_of_the_call() -> None:
    """The example makes a copy where the call makes a view."""

    def f(x: Tensor, y: Tensor) -> Any:
        v, a = x.t().reshape(-1), cut(y)
        x.mul_(2)
        return a, v * 1

    eager, replays = rows_of(f, grad=False, turned=True)
    assert OTHER_LAYOUT in eager[-1]
    assert_equal(replays, [], "replays")
    eager, replays = rows_of(f, grad=False)
    assert_equal((len(eager), {*replays}), (1, {CALLS - 1}), "eager, replays")


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def compare(replayed: Any, expected: Any, inputs: Callable[[int], list[Tensor]]) -> list[str]:
    """Compare calls with eager ones; return the reasons for eager parts."""
    for turn in range(CALLS):
        results = [fn(*inputs(turn)) for fn in (replayed, expected)]
        actual, want = ([x.tolist() for x in each] for each in results)
        assert_equal(actual, want, f"turn {turn}")
    return [row["eager"] for row in graph.report(replayed) if row["eager"]]


@pytest.mark.parametrize(("f", "shape"), [(overlapping, (2, 2)), (gaps, (3, 1))])
def test_shapes_of_the_call(f: Any, shape: tuple[int, int]) -> None:
    """One value has all of the memory in the example, but not in the calls."""
    replayed = graph.backend.apply(symbolic_trace(f), [torch.ones(shape), torch.ones(2)])
    eager = compare(replayed, f, lambda turn: [numbers(3, 2) + turn, numbers(2) + turn])
    assert OTHER_LAYOUT in eager[-1]


@pytest.mark.parametrize("size", [1, 2])
def test_integers_of_the_call(size: int) -> None:
    def f(x: Tensor, y: Tensor, n: int) -> Any:
        h = x * 1
        p, q = h[:n], h[1:]
        a = cut(y)
        p.add_(10)
        return a, q * 1

    replayed = graph.backend.apply(symbolic_trace(f), [numbers(3, 2), torch.ones(2), 3])
    for turn in range(CALLS):
        x, y = numbers(3, 2) + turn, numbers(2) + turn
        assert_equal(
            [*map(Tensor.tolist, replayed(x, y, size))], [*map(Tensor.tolist, f(x, y, size))]
        )


def test_symbolic_shapes() -> None:
    """The graph of Dynamo serves calls of all shapes."""

    def f(x: Tensor, y: Tensor) -> Any:
        h = x * 1
        p, q = h[:3], h[1:]
        a = cut(y)
        p.add_(10)
        return a, q * 1

    regions: list[Any] = []

    def compiler(gm: torch.fx.GraphModule, values: Any) -> Any:
        regions.append(graph.backend.apply(gm, values))
        return regions[-1]

    compiled = torch.compile(f, backend=compiler, dynamic=True)
    for rows in (3, 4, 5, 4):
        for turn in range(3):
            x, y = numbers(rows, 4) + turn, numbers(2)
            assert_equal([*map(Tensor.tolist, compiled(x, y))], [*map(Tensor.tolist, f(x, y))])
    torch._dynamo.reset()
    assert any(
        OTHER_LAYOUT in (row["eager"] or "") for each in regions for row in graph.report(each)
    )


def test_examples_from_the_program() -> None:
    """Nodes have examples, but what they write is not noted yet."""
    gm = symbolic_trace(overlapping)
    FakeTensorProp(gm).propagate(numbers(3, 2), numbers(2))
    replayed = graph.backend.apply(gm, [numbers(3, 2), numbers(2)])
    (reason,) = compare(replayed, overlapping, lambda turn: [numbers(3, 2) + turn, numbers(2)])
    assert LOST in reason


class Weighted(nn.Module):
    """A tensor of a module that gradients flow to, without being a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(3, 2, requires_grad=True)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """Write to memory that an expanded view has too."""
        h = x * self.weight
        v, a = h[:, :1].expand(3, 8), cut(y)
        h.add_(10)
        return a, v * 1


def test_gradients_of_buffers() -> None:
    gm = symbolic_trace(Weighted())
    replayed = graph.backend.apply(gm, [numbers(3, 2), numbers(2)])
    eager = compare(replayed, gm, lambda turn: [numbers(3, 2) + turn, numbers(2) + turn])
    assert LOST in eager[-1]


class Through(nn.Module):
    """A write to a value after a cut that a module may have returned as it is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """Write to a part of the result, and use another part of what the module got."""
        h = x * 1
        v = self.module(h.t())
        p, q = v[:2], h[1:]
        a = cut(y)
        p.add_(10)
        return a, q * 1


@pytest.mark.parametrize("module", [nn.Sigmoid(), nn.Flatten(0)], ids=["sigmoid", "flatten"])
def test_modules_that_return_their_input(module: nn.Module) -> None:
    """Another module is there at the calls, or other strides are."""
    gm = symbolic_trace(Through(module))
    replayed = graph.backend.apply(gm, [numbers(3, 2), numbers(2)])
    (reason,) = compare(replayed, gm, lambda turn: [(numbers(2, 3) + turn).t(), numbers(2)])
    assert LOST in reason
    gm.module = nn.Identity()
    compare(replayed, gm, lambda turn: [numbers(3, 2) + turn, numbers(2)])


def converted(x: Tensor, y: Tensor) -> Any:
    h = x * 1
    v, a = h.to(torch.float64), cut(y)
    h.add_(10)
    return a, v * 1


def test_copies_of_another_type() -> None:
    """They share no memory, and gradients change nothing about it."""
    eager, replays = rows_of(converted, grad=True)
    assert_equal(any(LOST in reason for reason in eager), False, "reasons")
    assert_equal({*replays}, {CALLS - 1}, "replays")


def cache(x: Tensor, y: Tensor) -> Any:
    flat, a = x.view(-1), cut(y * 2)
    x.add_(1)
    return flat * 2, a


def returned_view(x: Tensor, y: Tensor) -> Any:
    h = x * 1
    v, a = h[1:], cut(y)
    h.add_(1)
    return a, h, v


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("f", [cache, returned_view])
def test_views_in_graphs_of_operators(f: Any, mode: str) -> None:
    """Examples of a real trace share no memory, and those of a symbolic one have symbolic sizes."""
    gm = make_fx(f, tracing_mode=mode)(numbers(3, 2), numbers(2))
    replayed = graph.backend.apply(gm, [numbers(3, 2), numbers(2)])
    eager = compare(replayed, f, lambda turn: [numbers(3, 2) + turn, numbers(2) + turn])
    assert_equal(any(LOST in reason for reason in eager), False, "reasons")


def test_graphs_of_operators() -> None:
    """Writes are also read from the schemas of operators."""
    gm = make_fx(overlapping)(torch.ones(3, 2), torch.ones(2))
    replayed = graph.backend.apply(gm, [torch.ones(3, 2), torch.ones(2)])
    (row,) = graph.report(replayed)
    assert LOST in row["eager"]


def test_as_an_error() -> None:
    with raises(GraphError, LOST):
        graph.backend.apply(
            symbolic_trace(overlapping), [torch.ones(3, 2), torch.ones(2)], on_fail="raise"
        )


class Holding(nn.Module):
    """A buffer, and a view of it, on both sides of a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.total = nn.Parameter(torch.zeros(3, 2), requires_grad=False)

    def forward(self, y: Tensor) -> Any:
        """Write to both."""
        v, a = self.total.t(), cut(y)
        self.total.add_(1)
        b = cut(a)
        v.mul_(2)
        return b, self.total * 1, v * 1


def test_views_of_buffers() -> None:
    expected = symbolic_trace(Holding())
    replayed = graph.backend.apply(symbolic_trace(Holding()), [torch.ones(2)])
    for turn in range(CALLS):
        results = [fn(torch.ones(2) * turn) for fn in (replayed, expected)]
        actual, want = ([x.tolist() for x in each] for each in results)
        assert_equal(actual, want, f"turn {turn}")
    rows = graph.report(replayed)
    assert_equal(any(LOST in (row["eager"] or "") for row in rows), False, "reasons")


@pytest.mark.parametrize("f", [overlapping, gaps, in_place_function, plain_view])
def test_graphs_of_dynamo(f: Any) -> None:
    """Their nodes have examples, and functions of torch that no schema describes."""
    regions: list[Any] = []

    def compiler(gm: torch.fx.GraphModule, values: Any) -> Any:
        regions.append(graph.backend.apply(gm, values))
        return regions[-1]

    compiled = torch.compile(f, backend=compiler)
    for turn in range(CALLS):
        expected = outcome(f, turn, grad=False, turned=False)
        assert_equal(outcome(compiled, turn, grad=False, turned=False), expected, f"turn {turn}")
    eager = [row["eager"] or "" for row in graph.report(regions[0])]
    assert_equal(any(LOST in reason for reason in eager), f is not plain_view, "reasons")
    torch._dynamo.reset()
