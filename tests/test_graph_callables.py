"""Kinds of callables, and what torch itself refuses in a watched run."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from commlib import graph
from commlib.errors import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises


class Scaled:
    """A class whose methods are captured."""

    scale = 2.0

    @classmethod
    @graph.capture(outputs="copy")
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple."""
        return x * cls.scale

    @staticmethod
    @graph.capture(outputs="copy")
    def of_none(x: torch.Tensor) -> torch.Tensor:
        """Return another one."""
        return x * 5


class Tripled(Scaled):
    """A class with another scale."""

    scale = 3.0


def test_methods_of_classes() -> None:
    """Each class has its own graphs; instances use those of their class."""
    x = torch.ones(2)
    for turn in range(4):
        for owner, scale in ((Scaled, 2.0), (Tripled, 3.0), (Scaled(), 2.0), (Tripled(), 3.0)):
            assert_bits_equal(owner.of_class(x), x * scale, f"turn {turn}")
        assert_bits_equal(Scaled.of_none(x), x * 5, f"turn {turn}")
    captured: Any = Scaled.of_class
    assert_equal(captured is Scaled().of_class, True, "one object per class")
    assert_equal(graph.report(captured)[0]["replays"], 7, "replays")


class AsyncCall:
    """An object that is called with await."""

    async def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return it."""
        return x


class AsyncModule(nn.Module):
    """A module that is called with await."""

    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return it."""
        return x


@pytest.mark.parametrize("made", [AsyncCall, AsyncModule, lambda: functools.partial(AsyncCall())])
def test_async_objects(made: Callable[[], Any]) -> None:
    with raises(GraphError, "Async", "is an async function"):
        graph.capture(made())


def lazy() -> nn.Module:
    """Return a module that makes its parameters in its first call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))


@pytest.mark.parametrize("on_fail", ["raise", "eager"])
@pytest.mark.parametrize("way", ["module", "closure", "argument"])
def test_lazy_modules(way: str, on_fail: Any) -> None:
    """The call that makes parameters is eager, and the next one is captured."""

    def trained(captured: Callable[[Any], Any]) -> list[torch.Tensor]:
        module = lazy()
        functions: dict[str, Any] = {
            "module": module,
            "closure": lambda x: module(x),
            "argument": lambda x, module=None: module(x),
        }
        call, results = captured(functions[way]), list[torch.Tensor]()
        for turn in range(5):
            x = torch.arange(6.0).view(2, 3) * (turn + 1)
            out = call(x, module=module) if way == "argument" else call(x)
            out.sum().backward()
            results += [out.detach().clone(), *(p.grad.clone() for p in module.parameters())]  # type: ignore[union-attr]
        return results

    graphs = list[Any]()

    def captured(fn: Any) -> Any:
        graphs.append(graph.capture(fn, outputs="copy", on_fail=on_fail))
        return graphs[-1]

    for one, want in zip(trained(captured), trained(lambda f: f), strict=True):
        assert_bits_equal(one, want)
    assert_equal(sum(row["replays"] for row in graph.report(graphs[0])) > 1, True, "replays")


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flex_attention": lambda x: flex_attention(x, x, x),
    "cond": lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,)),
}


@pytest.mark.filterwarnings("ignore:flex_attention called")
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_that_take_functions(name: str) -> None:
    """They are refused by name, and eager calls work after that."""
    x = torch.arange(64.0).view(1, 2, 4, 8)
    f: Any = OPERATORS[name]
    with raises(GraphError, f"{name} can't be captured", "test_graph_callables.py", "; use"):
        graph.capture(f)(x)
    g = graph.capture(f, on_fail="eager")
    for turn in range(3):
        assert_bits_equal(g(x), f(x), f"turn {turn}")
