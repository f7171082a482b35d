"""State of Python that no graph can keep: it is refused by name, and left as it was."""

import random
import threading
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.options import OnFail
from tests.support.checks import assert_bits_equal, assert_equal, raises


class Counter:
    """An object that counts its calls."""

    calls = 0


def test_a_name_that_the_function_binds_after_its_part() -> None:
    state = types.SimpleNamespace(h=None)

    @graph.eager
    def part(y: torch.Tensor) -> None:
        state.h = -y

    def f(x: torch.Tensor) -> torch.Tensor:
        part(x)
        state.h = y = x * 2
        return y

    with pytest.raises(GraphError, match=r"an eager part of it both bind SimpleNamespace.h"):
        graph.capture(f)(torch.ones(2))


def test_an_object_that_hides_tensors_of_the_graph() -> None:
    state = types.SimpleNamespace(h=None)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        state.h = lambda: y
        return y

    with pytest.raises(GraphError, match=r"binds SimpleNamespace.h to a function, in which"):
        graph.capture(f)(torch.ones(2))


def test_two_names_that_change_places() -> None:
    state = types.SimpleNamespace(now=torch.zeros(2), next=torch.ones(2))

    def f(x: torch.Tensor) -> torch.Tensor:
        state.now, state.next = state.next, state.now
        out: torch.Tensor = state.now + x
        return out

    with pytest.raises(GraphError, match=r"rebinds SimpleNamespace.now to a different tensor"):
        graph.capture(f)(torch.ones(2))


def test_a_name_that_a_replay_leaves_alone() -> None:
    """The function comes to bind a name that it did not bind at the capture."""
    state, more = types.SimpleNamespace(last=None, key=0), threading.Event()

    def f(x: torch.Tensor) -> torch.Tensor:
        if more.is_set():
            state.key = 7
        return x * 2

    g = graph.capture(f, verify=True)
    for _ in range(3):
        g(torch.ones(2))
    more.set()
    words = r"key, which the function binds, leaf 0 is 7, and replayed 0"
    with pytest.raises(GraphError, match=words) as excinfo:
        g(torch.ones(2))
    assert_equal(excinfo.value.done, True, "whether the call was made")
    assert_equal(state.key, 7, "what the function did")


@pytest.mark.parametrize("on_fail", ["raise", "eager"])
def test_a_refused_call(on_fail: OnFail) -> None:
    """A refused call has counted once, or not at all: memory, objects and gradients."""
    weight, total, seen = torch.ones(2, requires_grad=True), torch.zeros(2), list[float]()
    weight.grad = grad = torch.zeros(2)
    counter = Counter()

    def f(x: torch.Tensor) -> torch.Tensor:
        counter.calls += 1
        total.add_(x)
        (weight * x).sum().backward()
        seen.append(float(total.sum()))  # which no graph can hold
        return x * 2

    g, x = graph.capture(f, on_fail=on_fail, outputs="copy"), torch.ones(2)
    if on_fail == "raise":
        with raises(GraphError, "item can't be captured"):
            g(x)
        assert_equal((counter.calls, total.tolist(), seen), (0, [0.0, 0.0], []), "as before")
        assert_equal((weight.grad is grad, grad.tolist()), (True, [0.0, 0.0]), "the gradient")
        return
    for turn in range(1, 4):
        assert_bits_equal(g(x), x * 2)
        assert_equal((counter.calls, len(seen)), (turn, turn), f"turn {turn}")
        assert_bits_equal(total, x * turn)
        assert_bits_equal(weight.grad, x * turn)


def test_python_random() -> None:
    for draw in (random.random, np.random.rand):
        before = random.getstate(), list(np.random.get_state()[1])  # type: ignore[index]
        with pytest.raises(GraphError, match="draws from Python's or NumPy's generator"):
            graph.capture(lambda x, draw=draw: x * float(draw()))(torch.ones(2))
        assert (random.getstate(), list(np.random.get_state()[1])) == before  # type: ignore[index]


@pytest.mark.parametrize(
    "made",
    [
        lambda: random.Random(1).random,
        lambda: np.random.default_rng(1).random,
        lambda: np.random.RandomState(1).random_sample,
    ],
)
def test_generators_of_the_program(made: Callable[[], Callable[[], float]]) -> None:
    """What the runs between draw is drawn again: a call that stays eager goes on as eager code."""
    draw, other, x = made(), made(), torch.ones(2)
    holder = types.SimpleNamespace(draw=draw.__self__, name=draw.__name__)  # type: ignore[attr-defined]
    g = graph.capture(
        lambda x: x * float(getattr(holder.draw, holder.name)()), outputs="copy", on_fail="eager"
    )
    for turn in range(6):
        assert_bits_equal(g(x), x * float(other()), f"turn {turn}")
