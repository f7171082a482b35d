"""Captured functions that read, count and bind state of Python."""

import argparse
import array
import collections
import decimal
import enum
import fractions
import functools
import queue
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.options import First, OnFail
from tests.support.checks import assert_bits_equal, assert_equal, raises

# -- what Python holds -----------------------------------------------------------------------------


class Counter:
    """An object that counts its calls."""

    calls = 0


def test_python_counts_once() -> None:
    """What each call changes is refused by name, or done at each call by an eager part."""
    seen, counter, number = list[int](), Counter(), 0

    def count() -> None:
        nonlocal number
        number += 1
        counter.calls += 1
        seen.append(1)

    def f(x: torch.Tensor) -> torch.Tensor:
        count()
        return x + 1

    with raises(GraphError, "the function changes a variable of its closure", "graph.eager"):
        graph.capture(f)(torch.ones(2))
    assert_equal((number, counter.calls, len(seen)), (0, 0, 0), "as before")
    count = graph.eager(count)
    g = graph.capture(f, outputs="copy")
    for turn in range(1, 8):
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), 2.0))
        assert_equal((number, counter.calls, len(seen)), (turn, turn, turn), f"turn {turn}")
    assert_equal(graph.report(g)[0]["replays"], 6, "replays")


def test_names_that_each_call_binds() -> None:
    """A tensor that the function keeps under a name is that of the last call."""
    model: Any = nn.Linear(2, 2)

    def f(x: torch.Tensor) -> torch.Tensor:
        model.last = last = model(x).detach()
        doubled: torch.Tensor = last * 2
        return doubled

    g = graph.capture(f, outputs="copy")
    with torch.no_grad():
        for turn in range(6):
            x = torch.full((1, 2), float(turn))
            assert_bits_equal(g(x), model(x) * 2, f"turn {turn}")
            assert_bits_equal(model.last, model(x), f"turn {turn}, under its name")
    assert_equal(graph.report(g)[0]["replays"], 5, "replays")


@pytest.mark.parametrize("verify", [False, True])
def test_names_of_tensors_that_stay(verify: bool) -> None:
    """A tensor of the program's is bound itself, under a second name, and an argument too."""
    cache: dict[Any, torch.Tensor] = {0: torch.zeros(2), 1: torch.ones(2)}
    seen = types.SimpleNamespace()

    def f(k: int, x: torch.Tensor) -> torch.Tensor:
        cache["last"], seen.x = cache[k], x
        cache[k].add_(x)
        return cache["last"] * 2

    g, want = graph.capture(f, outputs="copy", verify=verify), [0.0, 1.0]
    for turn, k in enumerate((0, 1, 0, 0, 1, 1, 0, 1, 0)):
        x = torch.full((2,), float(turn))
        want[k] += turn
        assert_bits_equal(g(k, x), torch.full((2,), want[k] * 2), f"turn {turn}")
        assert_equal(cache["last"] is cache[k], True, f"the same tensor at turn {turn}")
        assert_equal(seen.x is x, True, f"the argument itself at turn {turn}")
    cache[0] = torch.zeros(2)
    for turn in range(3):
        assert_bits_equal(
            g(0, torch.ones(2)), torch.full((2,), turn * 2 + 2.0), f"turn {turn} of another one"
        )
        assert_equal(cache["last"] is cache[0], True, "the other one")


VALUES: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.shape[0] * 1.5,
    lambda x: f"of {x.shape[0]} elements",
    lambda x: None if x.shape[0] == 2 else (x.shape[0], x.dtype),
    lambda x: (x * 2, [x + 1]),
    lambda x: x.shape,
    lambda x: np.int64(x.shape[0]),
    lambda x: Size(x.shape[0]),
    lambda x: (range(x.shape[0]), slice(x.shape[0])),
    lambda x: frozenset(x.shape),
    lambda x: [Counter, Clipped][x.shape[0] - 2],
    lambda x: [x.shape[0], {"size": x.shape[0]}],
    lambda x: set(x.shape),
    lambda x: collections.Counter(x.shape),
]


class Size(enum.Enum):
    """Names of sizes."""

    TWO, THREE = 2, 3


@pytest.mark.parametrize("first", ["once", "warmup"])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("value", VALUES)
def test_values_that_names_are_bound_to(
    value: Callable[[torch.Tensor], Any], verify: bool, first: First
) -> None:
    """Made again at each call: plain values, containers, and tensors in tuples and lists."""
    state = types.SimpleNamespace(held=0)

    def f(x: torch.Tensor) -> torch.Tensor:
        state.held = value(x)
        return x * 2

    g = graph.capture(f, outputs="copy", verify=verify, first=first)
    for turn in range(10):
        x = torch.full((2 + turn % 2,), float(turn))
        assert_bits_equal(g(x), x * 2, f"turn {turn}")
        actual, want = torch.utils._pytree.tree_leaves(state.held), value(x)
        for one, other in zip(actual, torch.utils._pytree.tree_leaves(want), strict=True):
            assert_equal(
                torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, True
            )


def test_objects_that_names_are_bound_to() -> None:
    """Each replay binds another one, and one that can't be copied is left alone."""
    state, lock = types.SimpleNamespace(held=None, locks=None), threading.Lock

    def f(x: torch.Tensor) -> torch.Tensor:
        state.held, state.locks = types.SimpleNamespace(seen=[x.shape[0]]), [lock()]
        return x * 2

    g = graph.capture(f, outputs="copy", verify=False)
    for turn in range(8):
        g(torch.ones(2 + turn % 2))
        assert_equal(state.held.seen, [2 + turn % 2], f"turn {turn}")
        state.held.seen.append(turn)
        state.held = None if turn % 3 else state.held


def test_an_eager_part_that_binds_names() -> None:
    """It binds them at replays as it runs; one that the function binds too is an error."""
    state, negative = types.SimpleNamespace(part=None, own=None), threading.Event()
    log = list(range(1000))

    @graph.eager
    def part(y: torch.Tensor) -> None:
        state.part = y.clone()
        log.append(len(log))
        if negative.is_set():
            state.own = -y

    def f(x: torch.Tensor) -> torch.Tensor:
        state.own = y = x * 2
        part(y)
        return y + 1

    for verify in (False, True):
        g = graph.capture(f, outputs="copy", verify=verify)
        for turn in range(6):
            x = torch.full((2,), float(turn))
            assert_bits_equal(g(x), x * 2 + 1)
            assert_bits_equal(state.part, x * 2, f"what the part has bound at turn {turn}")
            assert_bits_equal(state.own, x * 2, f"what the function has bound at turn {turn}")
        assert len(log) == 1006, len(log)
        del log[1000:]
        negative.set()
        with pytest.raises(GraphError) as excinfo:
            g(torch.ones(2))
        assert_equal(excinfo.value.done, True, "whether the call was made")
        negative.clear()
        del log[1000:]


def test_keys_that_are_tensors() -> None:
    """Their values are not read: the optimizer's state by parameter that programs write by hand."""
    weights = [torch.ones(2), torch.full((2,), 2.0)]
    momenta = {weight: torch.zeros(2) for weight in weights}

    def step(x: torch.Tensor) -> None:
        for weight, momentum in momenta.items():
            weight.sub_(momentum.mul_(0.5).add_(x))

    g, want, held = graph.capture(step, verify=False), [w.clone() for w in weights], torch.zeros(2)
    for turn in range(12):
        x = torch.full((2,), float(turn))
        held = held * 0.5 + x
        want = [w - held for w in want]
        g(x)
        for weight, one in zip(weights, want, strict=True):
            assert_bits_equal(weight, one, f"turn {turn}")
    assert_equal(graph.report(g)[0]["replays"], 11, "replays")


# -- kinds of Python state -------------------------------------------------------------------------

SCALES = {"factor": 2.0}


@dataclass(slots=True)
class Slotted:
    """An object without a ``__dict__``."""

    scale: float = 2.0
    captures: int = 0  # a name that commlib once took for its own


class Scaled(nn.Module):
    """A module whose forward reads a global."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple."""
        return x * SCALES["factor"]


def _in_slots() -> tuple[Any, Callable[[float], None]]:
    holder = Slotted()
    return lambda x: x * holder.scale, functools.partial(setattr, holder, "scale")


def _in_a_namespace() -> tuple[Any, Callable[[float], None]]:
    holder = argparse.Namespace(scale=2.0)
    return lambda x: x * holder.scale, functools.partial(setattr, holder, "scale")


def _in_a_list() -> tuple[Any, Callable[[float], None]]:
    holder = [2.0]
    return lambda x: x * holder[0], functools.partial(holder.__setitem__, 0)


def _in_a_global() -> tuple[Any, Callable[[float], None]]:
    return Scaled(), functools.partial(SCALES.__setitem__, "factor")


@pytest.mark.parametrize("made", [_in_slots, _in_a_namespace, _in_a_list, _in_a_global])
def test_settings_that_change(made: Callable[[], Any]) -> None:
    fn, set_to = made()
    g = graph.capture(fn, outputs="copy", verify=False)
    for scale in (2.0, 2.0, 2.0, 7.0, 7.0, 2.0):
        set_to(scale)
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), scale), f"scale {scale}")
    assert_equal(sum(row["replays"] for row in graph.report(g)) > 2, True, "replays")


def _counted_in_slots() -> tuple[Any, Callable[[], int]]:
    counter = Slotted()

    def note() -> None:
        counter.captures += 1

    return note, lambda: counter.captures


def _counted_by_a_counter() -> tuple[Any, Callable[[], int]]:
    counter = collections.Counter[str]()
    return lambda: counter.update(["call"]), lambda: counter["call"]


def _counted_in_a_namespace() -> tuple[Any, Callable[[], int]]:
    counter = types.SimpleNamespace(calls=0)

    def note() -> None:
        counter.calls += 1

    return note, lambda: counter.calls


class Counting:
    """An object whose class counts, and whose method counts in a global."""

    calls: ClassVar[int] = 0
    log: ClassVar[list[int]] = []

    def note(self) -> None:
        """Count in the class."""
        Counting.calls += 1

    def note_in_a_list(self) -> None:
        """Count by the length of a list that is the class's."""
        self.log.append(1)

    def note_elsewhere(self) -> None:
        """Count in a global."""
        CALLS["calls"] += 1


CALLS = {"calls": 0}


def _counted_at(held: Any, zero: Any = 0) -> tuple[Any, Callable[[], Any]]:
    held[0] = zero
    return lambda: held.__setitem__(0, held[0] + 1), lambda: held[0]


def _counted_in_a_tensor() -> tuple[Any, Callable[[], int]]:
    weight: Any = torch.zeros(2)
    return lambda: setattr(weight, "calls", getattr(weight, "calls", 0) + 1), lambda: getattr(
        weight, "calls", 0
    )


def _counted_in_another_tensor() -> tuple[Any, Callable[[], int]]:
    weight: Any = torch.zeros(2)
    weight.calls = 0
    return lambda: setattr(weight, "calls", weight.calls + 1), lambda: weight.calls


def _counted_in_a_class() -> tuple[Any, Callable[[], int]]:
    Counting.calls = 0
    return Counting().note, lambda: Counting.calls


def _counted_in_a_list_of_a_class() -> tuple[Any, Callable[[], int]]:
    Counting.log.clear()
    return Counting().note_in_a_list, lambda: len(Counting.log)


def _counted_in_a_global() -> tuple[Any, Callable[[], int]]:
    CALLS["calls"] = 0
    return Counting().note_elsewhere, lambda: CALLS["calls"]


@pytest.mark.parametrize(
    "made",
    [
        _counted_in_slots,
        _counted_by_a_counter,
        _counted_in_a_namespace,
        _counted_in_a_class,
        _counted_in_a_list_of_a_class,
        _counted_in_a_global,
        _counted_in_a_tensor,
        _counted_in_another_tensor,
        lambda: _counted_at(np.zeros(2, np.int64)),
        lambda: _counted_at(np.zeros((2, 2000), np.float32)[:, 999]),
        lambda: _counted_at(np.zeros(1, object)),
        lambda: _counted_at(bytearray(2)),
        lambda: _counted_at(array.array("q", [0])),
        lambda: _counted_at([0], np.int64(0)),
        lambda: _counted_at([0], decimal.Decimal(0)),
        lambda: _counted_at([0], fractions.Fraction(0)),
    ],
)
@pytest.mark.parametrize("on_fail", ["raise", "eager"])
def test_counters(made: Callable[[], Any], on_fail: OnFail) -> None:
    """They count each call once, and are put back where a call is refused."""
    note, counted = made()

    def f(x: torch.Tensor) -> torch.Tensor:
        note()
        result: torch.Tensor = x + float(counted())
        return result

    g, x = graph.capture(f, on_fail=on_fail, outputs="copy"), torch.zeros(2)
    for turn in range(1, 6):
        if on_fail == "raise":
            with raises(GraphError, "in each run (", "1", "then", "2"):
                g(x)
        else:
            assert_bits_equal(g(x), x + turn, f"turn {turn}")
        assert_equal(counted(), turn if on_fail == "eager" else 0, f"turn {turn}")


@pytest.mark.parametrize("on_fail", ["raise", "eager"])
def test_elements_that_a_queue_is_given(on_fail: OnFail) -> None:
    """A replay would give it none."""
    q = queue.Queue[int]()

    def f(x: torch.Tensor) -> torch.Tensor:
        q.put(x.shape[0])
        return x * 2

    g, x = graph.capture(f, on_fail=on_fail), torch.zeros(2)
    for turn in range(1, 4):
        if on_fail == "raise":
            with raises(GraphError, "puts elements into q (Queue)", "after the call"):
                g(x)
        else:
            g(x)
        assert_equal(q.qsize(), turn if on_fail == "eager" else 0, f"turn {turn}")


def test_arrays_over_memory_of_tensors() -> None:
    """Operators write it, and replays too."""
    held = torch.zeros(2)
    seen = held.numpy()
    g = graph.capture(lambda x: (held.add_(x), x * len(seen))[1], verify=False)
    for turn in range(1, 5):
        g(torch.ones(2))
        assert_equal(seen.tolist(), [turn, turn], f"turn {turn}")


class Clipped(torch.autograd.Function):
    """A function of autograd that keeps settings in its class."""

    settings: ClassVar[dict[str, float]] = {"scale": 1.0}

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple, and change the next one."""
        result = x * Clipped.settings["scale"]
        Clipped.settings["scale"] *= 2
        return result

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return a multiple of the gradient."""
        return grad * Clipped.settings["scale"]


@pytest.mark.parametrize("on_fail", ["raise", "eager"])
def test_state_in_a_class_of_autograd(on_fail: OnFail) -> None:
    Clipped.settings["scale"] = 1.0
    clipped: Any = Clipped.apply
    g = graph.capture(lambda x: clipped(x), on_fail=on_fail)
    for turn in range(4):
        x = torch.ones(2, requires_grad=True)
        if on_fail == "raise":
            with raises(GraphError, "item 'scale' of a dict in each run"):
                g(x)
            assert_equal(Clipped.settings["scale"], 1.0)
        else:
            out = g(x)
            out.sum().backward()
            assert_bits_equal(out, torch.full((2,), 2.0**turn))
            assert_bits_equal(x.grad, torch.full((2,), 2.0 ** (turn + 1)))


def test_numbers_that_a_call_sets() -> None:
    """Replays set them too: the shape of the last call, a flag that the program takes back."""
    state = types.SimpleNamespace(count=0, used=False)

    def f(x: torch.Tensor) -> torch.Tensor:
        state.count, state.used = x.shape[0], True
        return x * 2

    g = graph.capture(f, outputs="copy", verify=False)
    for turn in range(10):
        n = 2 if turn % 2 else 3
        assert_bits_equal(g(torch.ones(n)), torch.full((n,), 2.0), f"turn {turn}")
        assert_equal((state.count, state.used), (n, True), f"turn {turn}")
        state.used = False
