"""Objects that a function uses and that raise as they are looked at: compared, named, printed."""

import types
import weakref
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from commlib import graph
from commlib.errors import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises


class Owner:
    """An object that weak references may refer to."""


class NoClass:
    """An object that hides its class."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class here")


class OddText(float):
    """A number whose text is an error."""

    def __repr__(self) -> str:
        raise RuntimeError("no text here")


@pytest.mark.parametrize(
    ("odd", "word"),
    [
        (lambda: weakref.proxy(Owner()), "ReferenceError: weakly-referenced"),
        (NoClass, "RuntimeError: no class here"),
        (lambda: Mock(spec=torch.Tensor), "TypeError: 'Mock' object"),
    ],
)
def test_objects_that_can_not_be_looked_at(odd: Any, word: str) -> None:
    """They are refused by what they raise; the function itself does not mind them."""
    obj, runs, x = odd(), list[int](), torch.ones(2)

    def f(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x * (2 if obj is not None else 3)

    with raises(GraphError, "raises as it is looked at", word, "commlib.graph.eager"):
        graph.capture(f)(x)
    assert_equal(len(runs), 0, "runs")
    g = graph.capture(f, on_fail="eager")
    for turn in range(1, 4):
        assert_bits_equal(g(x), x * 2, f"turn {turn}")
        assert_equal(len(runs), turn, "runs")


def test_an_object_that_can_not_be_looked_at_any_more() -> None:
    """The call that ends it counts once."""
    owner = [Owner()]
    proxy, runs, x = weakref.proxy(owner[0]), list[int](), torch.ones(2)

    def f(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        owner.clear()
        return x * (2 if proxy is not None else 3)

    g = graph.capture(f, on_fail="eager")
    for turn in range(1, 4):
        assert_bits_equal(g(x), x * 2, f"turn {turn}")
        assert_equal(len(runs), turn, "runs")


class Armed:
    """An object that hides its class from the first call on."""

    armed = False

    @property
    def __class__(self) -> Any:
        if Armed.armed:
            raise RuntimeError("no class now")
        return Armed


def test_an_object_that_the_call_hides() -> None:
    """The call counts once and returns its result, or is undone as a whole."""
    obj, total, x = Armed(), torch.zeros(2), torch.ones(2)

    def f(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        Armed.armed = True
        return x * (2 if obj is not None else 3)

    Armed.armed = False
    g = graph.capture(f, on_fail="eager")
    for turn in range(1, 4):
        assert_bits_equal(g(x), x * 2, f"turn {turn}")
        assert_bits_equal(total, torch.full((2,), float(turn)), "total")

    Armed.armed = False
    total.zero_()
    with raises(GraphError, "raises as it is looked at", "no class now"):
        graph.capture(f)(x)
    assert_bits_equal(total, torch.zeros(2), "total")


def test_settings_that_can_not_be_compared() -> None:
    """The call that brings them counts once, and its result is returned."""
    armed = [False]

    class Label(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            if armed[0]:
                raise ValueError("no comparison")
            return str.__eq__(self, other)

    holder, runs = types.SimpleNamespace(label=Label("a"), number=0), list[int]()
    x = torch.ones(2)

    def f(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        holder.label, armed[0] = Label(f"b{len(runs)}"), True
        return x * (2 if holder.label else 3)

    g = graph.capture(f, on_fail="eager")
    for turn in range(1, 4):
        armed[0] = False
        assert_bits_equal(g(x), x * 2, f"turn {turn}")
        assert_equal(len(runs), turn, "runs")
    armed[0] = False
    with raises(GraphError, "raises as it is looked at: ValueError: no comparison"):
        graph.capture(f)(x)


def test_numbers_with_their_own_text() -> None:
    holder, x = types.SimpleNamespace(scale=OddText(2.0)), torch.ones(2)
    g = graph.capture(lambda x: x * holder.scale, outputs="copy", verify=False)
    for value in (2.0, 2.0, 3.0, 3.0, 2.0):
        holder.scale = OddText(value)
        assert_bits_equal(g(x), x * value, f"{value}")
    assert_equal(len(g.entries), 2, "graphs")
