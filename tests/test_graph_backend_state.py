"""graph.backend.apply on graphs that have parameters and buffers, as traced modules do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from commlib import graph
from commlib.graph import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.cuts import cut

ROWS, WIDTH = 4, 8


class Norm(nn.Module):
    """A module that counts its calls, and a buffer that each call changes."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.norm, self.is_cut = nn.BatchNorm1d(WIDTH), is_cut
        self.total = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, and scale by the buffer."""
        y: Tensor = self.norm(x)
        y = cut(y) if self.is_cut else y
        return y * self.total.mul_(2)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_apply_changes_no_state(is_cut: bool) -> None:
    module = Norm(is_cut=is_cut)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    graph.backend.apply(symbolic_trace(module), [torch.ones(ROWS, WIDTH)])
    for name, x in module.state_dict().items():
        assert_bits_equal(x, before[name], name)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_state_counts_calls(is_cut: bool) -> None:
    expected, actual = (symbolic_trace(Norm(is_cut=is_cut)) for _ in range(2))
    replayed: Any = graph.backend.apply(actual, [torch.ones(ROWS, WIDTH)])
    for turn in range(5):
        x = torch.arange(32.0).view(ROWS, WIDTH) * (turn + 1)
        assert_bits_equal(replayed(x), expected(x), f"turn {turn}")
    state = expected.state_dict()
    for name, x in actual.state_dict().items():
        assert_bits_equal(x, state[name], name)
    rows = graph.report(replayed)
    assert_equal({row["replays"] for row in rows if row["eager"] is None}, {4}, "replays")


class Weights(nn.Module):
    """A parameter, and a module with another one."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
        self.scale, self.is_cut = nn.Parameter(torch.ones(WIDTH)), is_cut

    def forward(self, x: Tensor) -> Tensor:
        """Use both."""
        y: Tensor = self.inner(x * self.scale)
        return (cut(y) if self.is_cut else y) * 2


def new_data(gm: Any) -> None:
    weight = gm.get_parameter("inner.0.weight")
    weight.data = weight.data * 3
    gm.scale.data = gm.scale.data * 5


def new_parameters(gm: Any) -> None:
    linear = gm.get_submodule("inner.0")
    linear.weight = nn.Parameter(linear.weight * 3)
    gm.scale = nn.Parameter(gm.scale * 5)


def assigned(gm: Any) -> None:
    gm.load_state_dict({name: x * 3 for name, x in gm.state_dict().items()}, assign=True)


def new_module(gm: Any) -> None:
    gm.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    nn.init.constant_(gm.inner[0].weight, 3)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("replace", [new_data, new_parameters, assigned, new_module])
def test_replaced_parameters(replace: Any, is_cut: bool) -> None:
    gm = symbolic_trace(Weights(is_cut=is_cut))
    replayed: Any = graph.backend.apply(gm, [torch.ones(ROWS, WIDTH)])
    for turn in range(8):
        if turn == 4:
            with torch.no_grad():
                replace(gm)
        x = torch.ones(ROWS, WIDTH) * (turn + 1)
        expected, actual = gm(x), replayed(x)
        assert_bits_equal(actual, expected, f"turn {turn}")
        parameters = [*gm.parameters()]
        want = torch.autograd.grad(expected.sum(), parameters)
        actual.sum().backward()
        for parameter, grad in zip(parameters, want, strict=True):
            assert_bits_equal(parameter.grad, grad, f"gradient {turn}")
            parameter.grad = None
    rows = graph.report(replayed)
    assert_equal(all(row["replays"] for row in rows if row["eager"] is None), True, "replays")


class Counting(nn.Module):
    """A part of a module that counts how often its parts are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.add_module("0", nn.Linear(WIDTH, WIDTH, bias=False))

    def __getattr__(self, name: str) -> Any:
        """Look up a part."""
        vars(self)["looks"] += 1
        return super().__getattr__(name)


def test_attributes_are_compared_without_being_looked_up() -> None:
    """A search of names takes longer than a replay."""
    gm = symbolic_trace(Weights(is_cut=True))
    replayed: Any = graph.backend.apply(gm, [torch.ones(ROWS, WIDTH)])
    inner: Any = Counting()
    gm.inner = inner
    (follow,) = replayed.followers
    follow()
    looks = vars(inner)["looks"]
    follow()
    assert_equal((looks > 0, vars(inner)["looks"]), (True, looks), "looks")


def test_attributes_of_other_kinds() -> None:
    """A parameter becomes a buffer, then a plain attribute, and a parameter again."""
    gm: Any = symbolic_trace(Weights(is_cut=True))
    replayed: Any = graph.backend.apply(gm, [torch.ones(ROWS, WIDTH)])
    x = torch.ones(ROWS, WIDTH)
    for turn in range(12):
        value = torch.full((WIDTH,), float(turn))
        if turn % 3 == 0:
            del gm.scale
        if turn == 3:
            gm.register_buffer("scale", value)
        elif turn == 6:
            gm.scale = value
        elif turn % 3 == 0:
            gm.scale = nn.Parameter(value)
        assert_bits_equal(replayed(x), gm(x), f"turn {turn}")


class Returning(nn.Module):
    """A buffer that is returned from a graph that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.total = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        """Write to it and return it."""
        self.total.add_(1)
        return cut(x * 1), self.total


def test_returned_buffers() -> None:
    gm = symbolic_trace(Returning())
    replayed: Any = graph.backend.apply(gm, [torch.ones(WIDTH)])
    for turn in range(4):
        x, total = replayed(torch.ones(WIDTH) * turn)
        assert_bits_equal(x, torch.ones(WIDTH) * 3 * turn, f"turn {turn}")
        assert_equal((total is gm.total, total.tolist()), (True, [turn + 1] * WIDTH), "buffer")


def test_modules_that_read_values() -> None:
    """A batch norm without momentum divides by the number of its batches, on the host."""
    expected, actual = (
        symbolic_trace(nn.Sequential(nn.BatchNorm1d(WIDTH, momentum=None))) for _ in range(2)
    )
    replayed: Any = graph.backend.apply(actual, [torch.ones(ROWS, WIDTH)])
    for turn in range(4):
        x = torch.arange(32.0).view(ROWS, WIDTH) * (turn + 1)
        assert_bits_equal(replayed(x), expected(x), f"turn {turn}")
    (row,) = graph.report(replayed)
    assert "the host reads a value: _0: " in row["eager"]
    with raises(GraphError, "the host reads a value"):
        graph.backend.apply(actual, [torch.ones(ROWS, WIDTH)], on_fail="raise")
