"""Arguments that are objects: dataclasses by what they hold, sets and slices by content."""

import argparse
import collections
import functools
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
    result = batch.x * batch.scale
    for each in batch.more:
        result = result + (total(each) if hasattr(each, "x") else each)
    return result


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
    identical, batch = Identical(torch.zeros(2)), Batch(torch.zeros(2))
    for turn in range(4):
        identical.x.fill_(turn)
        g(identical)
        assert_bits_equal(identical.more, identical.x * 2, f"turn {turn}")
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
        for arg in (torch.from_numpy(array), tuple(array.tolist())):
            assert_bits_equal(g(torch.full((2,), 2.0), arg), want, f"turn {turn}")


# -- which object it is ----------------------------------------------------------------------------


@dataclass(eq=False)
class Config:
    """Plain values; equal to itself alone."""

    scale: float
    more: Any = None


@dataclass(frozen=True)
class Fixed:
    """Plain values with a hash."""

    scale: float
    more: Any = None


@dataclass
class Loose:
    """Plain values without a hash."""

    scale: float
    more: Any = None


ALL_PLAIN: list[Any] = [Config, Fixed, Loose, types.SimpleNamespace]


def test_an_object_with_a_cycle() -> None:
    """It is a value of the call, whatever refers to it."""

    def grown(x: torch.Tensor, node: Config) -> torch.Tensor:
        node.more = Config(2.0, node)
        return x * node.scale

    g, root = graph.capture(grown, on_fail="eager", verify=False), Config(3.0)
    for _ in range(3):
        assert_equal(g(torch.ones(1), root).item(), 3.0)
    parent = Config(1.0)
    parent.more = [Config(2.0, parent)]
    tree = graph.capture(lambda x, n: x * n.scale * n.more[0].scale, verify=False)
    for _ in range(3):
        assert_equal(tree(torch.ones(1), parent).item(), 2.0)
    assert_equal(tree.entries.replays, 2, "replays")
    state = Identical(torch.ones(1))
    state.more = [state]
    h = graph.capture(lambda s: s.x * s.more[0].x, outputs="copy", verify=False)
    for turn in range(3):
        state.x.fill_(turn)
        assert_equal(h(state).item(), turn**2, "squared")
    assert_equal(h.entries.replays, 2, "replays")


@pytest.mark.parametrize("kind", [*ALL_PLAIN, Batch, Identical, Frozen])
def test_objects_that_are_one(kind: Any) -> None:
    """Two attributes with the same object are another call than two with equal objects."""
    holds = kind in (Batch, Identical, Frozen)

    def made() -> Any:
        if kind is types.SimpleNamespace:
            return kind(scale=1.0)
        return kind(torch.ones(1)) if holds else kind(1.0)

    def one(x: torch.Tensor, pair: Any, other: Any) -> torch.Tensor:
        result = x * 10 if pair.more is pair.most else x
        return result * 3 if other is pair.more else result

    g = graph.capture(one, outputs="copy", verify=False)
    for _ in range(4):
        a, b, x = made(), made(), torch.ones(1)
        for more, most, other, want in ((a, a, a, 30), (a, b, b, 1), (a, b, a, 3), (a, a, b, 10)):
            pair = types.SimpleNamespace(more=more, most=most, x=x)
            assert_equal(g(x, pair, other).item(), want)
    if kind is not Config:
        assert_equal((len(g.entries), g.entries.replays), (4, 12), "graphs and replays")


@pytest.mark.parametrize("kind", ALL_PLAIN)
def test_a_function_gets_the_object_itself(kind: Any) -> None:
    """It may ask which one it is, and look it up."""
    a, b = kind(scale=1.0), kind(scale=2.0)
    table = {id(a): 5.0, id(b): 7.0}
    g = graph.capture(lambda x, c: x * table[id(c)] * (2 if c is a else 3), verify=False)
    for _ in range(3):
        assert_equal(g(torch.ones(1), a).item(), 10.0)
        assert_equal(g(torch.ones(1), b).item(), 21.0)
    assert_equal((len(g.entries), g.entries.replays), (2, 4), "graphs and replays")


def test_equal_objects_that_compare_by_identity() -> None:
    a, b = Config(1.0), Config(1.0)
    g = graph.capture(lambda x, c: x * 2 if c is a else x * 3, verify=False)
    for _ in range(3):
        assert_equal([g(torch.ones(1), c).item() for c in (a, b)], [2.0, 3.0])
    a.scale = 2.0
    h = graph.capture(lambda x, c: x * c.scale, outputs="copy", verify=False)
    for scale in (1.0, 4.0, 1.0):
        a.scale = scale
        assert_equal(h(torch.ones(1), a).item(), scale)


@pytest.mark.parametrize("kind", [Fixed, Loose, _namespace])
def test_new_objects_with_equal_values(kind: Any) -> None:
    """They are replays; numbers of other types or signs are not."""
    g = graph.capture(lambda x, c: x / (x * c.scale), outputs="copy", verify=False)
    for scale, want in ((1.0, 1), (0.0, torch.inf), (-0.0, -torch.inf), (1, 1)) * 3:
        c = kind(None, scale) if kind is _namespace else kind(scale, [kind(1.0), {"a": (1, 2)}])
        assert_equal(g(torch.ones(1), c).item(), want)
    assert_equal((len(g.entries), g.entries.replays), (4, 8), "graphs and replays")


@pytest.mark.parametrize("kind", [Config, Fixed])
def test_objects_that_are_handed_back(kind: Any) -> None:
    """The caller gets its own object, and names are bound to it."""
    holder = types.SimpleNamespace(last=None)

    def kept(x: torch.Tensor, c: Any) -> Any:
        holder.last = c
        return x * 2, c

    g, a, b = graph.capture(kept, verify=False), kind(1.0), kind(2.0)
    for _ in range(2):
        for c in (a, a, a, b, b, b):
            assert g(torch.ones(1), c)[1] is c
            assert holder.last is c
    assert g.entries.replays > 3, g


@pytest.mark.parametrize("kind", [Batch, Identical, Frozen, _namespace, Loose])
def test_objects_that_are_not_handed_back(kind: Any) -> None:
    """A replay would have the object of the capture."""
    holder = types.SimpleNamespace(last=None)

    def bound(c: Any) -> None:
        holder.last = [c]

    made = (lambda: kind(1.0)) if kind is Loose else (lambda: kind(torch.ones(1)))
    for fn, words in (
        (lambda c: {"a": [c]}, "returns an argument that is a "),
        (bound, "binds SimpleNamespace.last to an argument that is a "),
    ):
        with raises(GraphError, words):
            graph.capture(fn, verify=False)(made())
        g = graph.capture(fn, verify=False, on_fail="eager")
        for _ in range(3):
            c = made()
            result = g(c)
            assert (holder.last if result is None else result["a"])[0] is c


@dataclass
class Table(collections.OrderedDict):  # type: ignore[type-arg]
    """A dataclass that has items too."""

    x: Any = None


@dataclass
class Computed:
    """A batch with a property that is computed once."""

    x: torch.Tensor

    @functools.cached_property
    def double(self) -> torch.Tensor:
        """Twice the tensor."""
        return self.x * 2


def test_what_the_messages_name() -> None:
    def changes(x: torch.Tensor, c: Any) -> torch.Tensor:
        c.more.scale += 1
        return x * 2

    with raises(GraphError, "in argument 1 is a Loose", "which the function changes"):
        graph.capture(changes)(torch.ones(1), Frozen(torch.ones(1), 1.0, Loose(1.0)))
    with raises(GraphError, "argument 1 is a Table, which has no hash, and", "values in it"):
        graph.capture(lambda x, c: x * 2)(torch.ones(1), Table())
    for first in (False, True):
        batch, g = Computed(torch.ones(1)), graph.capture(lambda b: b.double * 2, on_fail="eager")
        getattr(batch, "double" if first else "x")
        assert_equal([g(batch).item() for _ in range(3)], [4.0] * 3)
        assert "which the function changes" not in str(g.eager), g.eager
    assert_equal(g.entries.replays, 2, "replays")


class Encoding(collections.UserDict[str, Any]):
    """A batch as tokenizers return it: a UserDict with further attributes."""

    def __init__(self, data: Any, sequences: int = 1) -> None:
        super().__init__(data)
        self.sequences = sequences


@pytest.mark.parametrize("kind", [Encoding, collections.UserDict])
def test_user_dicts(kind: Any) -> None:
    """The function gets an object of the class with the same items, at each call."""

    def f(batch: Any) -> Any:
        assert type(batch) is kind, "another class"
        assert sorted(batch) == ["scale", "x"], "other items"
        assert kind is not Encoding or batch.sequences == 1, "another attribute"
        return batch["x"] * batch["scale"]

    g = graph.capture(f, outputs="copy")
    for turn in range(6):
        batch = kind({"x": torch.ones(3) * turn, "scale": 2.0 + turn % 2})
        want = torch.full((3,), turn * (2.0 + turn % 2))
        assert_bits_equal(g(batch), want, f"turn {turn}")
        assert_equal(batch["scale"], 2.0 + turn % 2, "the caller's own")
    assert_equal(len(g.entries), 2, "one graph per scale")
    assert_equal(g.entries.replays > 0, True, "replays")


def test_user_dicts_that_a_function_changes() -> None:
    """It is changed at each call, as eagerly, or the call is refused."""

    def f(batch: Any) -> Any:
        batch["y"] = batch["x"] * 2
        return batch["y"] + 1

    g = graph.capture(f, outputs="copy", on_fail="eager")
    for turn in range(4):
        batch = Encoding({"x": torch.ones(3) * turn})
        assert_bits_equal(g(batch), torch.full((3,), turn * 2.0 + 1))
        assert_bits_equal(batch["y"], torch.full((3,), turn * 2.0), f"turn {turn}")


def test_a_user_dict_in_another_argument() -> None:
    g = graph.capture(lambda args: args["in"]["x"] + args["n"], outputs="copy")
    for turn in range(4):
        x = torch.ones(2) * turn
        assert_bits_equal(g({"in": Encoding({"x": x}), "n": 1}), x + 1, f"turn {turn}")


def test_user_dicts_with_other_objects_at_each_call(caplog: pytest.LogCaptureFixture) -> None:
    """Each call has its own graph then, as no two of the objects are equal; the log says so."""
    g = graph.capture(lambda batch: batch["x"] + 1, outputs="copy")
    with caplog.at_level("WARNING", "commlib"):
        for turn in range(12):
            batch = Encoding({"x": torch.ones(2) * turn})
            batch.source = object()  # type: ignore[attr-defined]
            assert_bits_equal(g(batch), torch.ones(2) * turn + 1, f"turn {turn}")
    assert "; pass the tensors in it alone (dict(batch))" in caplog.text
