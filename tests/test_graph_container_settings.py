"""Settings in containers that also hold other objects than plain values."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commlib import graph
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.held_settings import Held, each_value_counts


def _mapping(kind: Any) -> Any:
    made = kind()
    made.update(scale=1.0, obj=object(), weight=torch.ones(1))
    return made


CONTAINERS: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "dict": (lambda: _mapping(dict), lambda d: d["scale"], "scale"),
    "ordered": (lambda: _mapping(OrderedDict), lambda d: d["scale"], "scale"),
    "default": (lambda: _mapping(lambda: defaultdict(int)), lambda d: d["scale"], "scale"),
    "list": (lambda: [1.0, object(), torch.ones(1), len], lambda d: d[0], 0),
    "deque": (lambda: deque([1.0, object()]), lambda d: d[0], 0),
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("nest", ["no", "dict", "list", "tuple"])
@pytest.mark.parametrize("where", ["variable", "object", "module"])
def test_one_value_that_is_not_plain(name: str, nest: str, where: str) -> None:
    """The others count."""
    make, read, key = CONTAINERS[name]
    inner = make()
    nested = {"no": inner, "dict": {"a": inner}, "list": [inner, object()], "tuple": (inner, len)}
    held = nested[nest]
    keys: dict[str, list[Any]] = {"no": [], "dict": ["a"], "list": [0], "tuple": [0]}

    def into(x: Any) -> Any:
        return x[keys[nest][0]] if keys[nest] else x

    config = SimpleNamespace(held=held)
    fn: Any = Held(held, lambda x: read(into(x)))
    if where == "variable":
        fn = lambda x: x * read(into(held))  # noqa: E731 - a function with a closure
    elif where == "object":
        fn = lambda x: x * read(into(config.held))  # noqa: E731
    each_value_counts(fn, lambda value: inner.__setitem__(key, value))


def test_a_container_that_stops_being_plain() -> None:
    """Neither it nor the other ones are hidden then."""
    one, other = {"scale": 1.0, "more": 0}, {"scale": 1.0, "more": 0}
    g = graph.capture(lambda x: x * one["scale"] * other["scale"], outputs="copy", verify=False)
    changes: tuple[tuple[dict[str, Any], str, Any], ...] = (
        (one, "more", object()),
        (one, "scale", 3.0),
        (other, "scale", 5.0),
        (other, "more", torch.ones(1)),
        (other, "scale", 7.0),
    )
    for held, name, value in changes:
        held[name] = value
        for turn in range(2):
            want = torch.full((2,), one["scale"] * other["scale"])
            assert_bits_equal(g(torch.ones(2)), want, f"{name}, turn {turn}")


def test_an_item_that_the_function_changes() -> None:
    """It is left out, and the other items of its container still count."""
    state: dict[str, Any] = {"scale": 1.0, "calls": 0}
    log: list[int] = []

    @graph.eager
    def count() -> None:
        state["calls"] += 1
        log.append(state["calls"])

    def f(x: torch.Tensor) -> Any:
        count()
        return x * state["scale"]

    each_value_counts(f, lambda value: state.__setitem__("scale", value))
    assert_equal((state["calls"], log), (6, [1, 2, 3, 4, 5, 6]), "calls")
