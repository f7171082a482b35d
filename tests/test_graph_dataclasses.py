"""Arguments that are objects: dataclasses by what they hold, sets and slices by content."""

import argparse
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.options import OnFail
from tests.support.checks import assert_bits_equal, assert_equal, raises


@dataclass
class Batch:
    """A batch without a hash."""

    x: torch.Tensor
    scale: float = 1.0
    more: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Identical:
    """A batch that is equal to itself alone."""

    x: torch.Tensor
    scale: float = 1.0
    more: Any = ()


@dataclass(frozen=True, slots=True)
class Frozen:
    """A batch with a hash of its content."""

    x: torch.Tensor
    scale: float = 1.0
    more: Any = ()


def _namespace(x: torch.Tensor, scale: float = 1.0, more: Any = ()) -> Any:
    return types.SimpleNamespace(x=x, scale=scale, more=more)


def _parsed(x: torch.Tensor, scale: float = 1.0, more: Any = ()) -> Any:
    return argparse.Namespace(x=x, scale=scale, more=more)


def total(batch: Any) -> Any:
    """Return a product of what a batch holds, and of what the batches in it hold."""
    found = batch.x * batch.scale
    for each in batch.more:
        found = found + (total(each) if hasattr(each, "x") else each)
    return found


@pytest.mark.parametrize("kind", [Batch, Identical, Frozen, _namespace, _parsed])
def test_tensors_in_objects_are_arguments(kind: Callable[..., Any]) -> None:
    """New objects with new tensors are replays; other plain values are another graph."""
    g = graph.capture(total, outputs="copy", verify=False)
    for turn in range(8):
        scale = 2.0 if turn < 6 else 3.0
        inner = kind(torch.full((2,), turn * 10.0))
        batch = kind(torch.full((2,), float(turn)), scale, [inner, torch.ones(2)])
        want = torch.full((2,), turn * scale + turn * 10 + 1)
        assert_bits_equal(g(batch), want, f"turn {turn}")
    assert_equal((len(g.entries), g.entries.replays), (2, 6), "graphs and replays")


def test_gradients_of_tensors_in_objects() -> None:
    g = graph.capture(total)
    for turn in range(4):
        x = torch.full((2,), float(turn), requires_grad=True)
        g(Batch(x, 3.0)).sum().backward()
        assert_bits_equal(x.grad, torch.full((2,), 3.0))
    assert_equal(g.entries.replays, 3, "replays")


@pytest.mark.parametrize("on_fail", ["raise", "eager"])
def test_an_object_that_the_function_changes(on_fail: OnFail) -> None:
    """It is the caller's own object that is changed, at each call."""

    def doubled(batch: Any) -> None:
        batch.more = batch.x * 2

    g = graph.capture(doubled, on_fail=on_fail, outputs="copy")
    kept, batch = Identical(torch.zeros(2)), Batch(torch.zeros(2))
    for turn in range(4):
        kept.x.fill_(turn)
        g(kept)
        assert_bits_equal(kept.more, kept.x * 2, f"turn {turn}")
        batch.x.fill_(turn)
        if on_fail == "eager":
            g(batch)
            assert_bits_equal(batch.more, batch.x * 2, f"turn {turn}")
            continue
        with raises(GraphError, "argument 0 is a Batch, which has no hash", "changes"):
            g(batch)
        assert_equal(batch.more, [], "undone")
    assert_equal(g.entries.replays, 3, "replays")


def test_an_object_in_itself() -> None:
    batch = Batch(torch.ones(1))
    batch.more.append(batch)
    with raises(GraphError, "is a Batch that holds itself"):
        graph.capture(lambda b: b.x * 2)(batch)


def test_sets_and_slices_count_by_content() -> None:
    def picked(x: torch.Tensor, of: slice, more: Any) -> Any:
        return x[of] * len(more) + sum(more)

    g, x = graph.capture(picked, outputs="copy", verify=False), torch.arange(6.0)
    for turn in range(8):
        of, more = slice(0, 2 + turn // 4), {turn // 2, 5}
        assert_bits_equal(g(x, of, more=more), picked(x, of, more), f"turn {turn}")
        assert_bits_equal(g(x, slice(1, 3), more=frozenset()), x[1:3] * 0, "no items")
    assert_equal(g.entries.replays > 7, True, f"{g.entries.replays} replays")


class Unhashable:
    """An object without a hash, whose class is not a dataclass."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.ones(2), ("argument 'y' is an array of NumPy", "torch.from_numpy(x)")),
        ([np.ones(2)], ("in argument 'y' is an array",)),
        (Unhashable(), ("argument 'y' is a Unhashable", "make its class a dataclass")),
    ],
)
@pytest.mark.parametrize("on_fail", ["raise", "eager"])
def test_what_has_no_hash(value: Any, words: tuple[str, ...], on_fail: OnFail) -> None:
    calls = []

    def f(x: torch.Tensor, y: Any) -> torch.Tensor:
        calls.append(y)
        return x * 2

    g = graph.capture(f, on_fail=on_fail, outputs="copy")
    for turn in range(3):
        if on_fail == "raise":
            with raises(GraphError, *words):
                g(torch.ones(2), y=value)
        else:
            assert_bits_equal(g(torch.ones(2), y=value), torch.full((2,), 2.0))
            assert_equal(len(calls), turn + 1, "calls")


def test_arrays_as_the_message_says() -> None:
    """Both remedies work."""
    array = np.ones(2, dtype=np.float32)
    g = graph.capture(lambda x, y: x * torch.as_tensor(y), outputs="copy", verify=False)
    for turn in range(6):
        array[:] = turn // 2
        want = torch.full((2,), turn // 2 * 2.0)
        for given in (torch.from_numpy(array), tuple(array.tolist())):
            assert_bits_equal(g(torch.full((2,), 2.0), given), want, f"turn {turn}")
