"""Captured functions that read other data at each run: iterators, queues, random choices."""

import itertools
import logging
import multiprocessing
import queue
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from commlib import graph
from commlib.errors import GraphError
from tests.support.checks import assert_equal, raises
from tests.support.hidden import HiddenCount

COUNT = 10


def tensors() -> list[torch.Tensor]:
    return [torch.full((1,), float(i)) for i in range(COUNT)]


def filled(kind: Any) -> Any:
    """Return a queue of tensors."""
    q = kind()
    for x in tensors():
        q.put(x)
    return q


def yielded() -> Iterator[torch.Tensor]:
    yield from tensors()


def from_variable(it: Any) -> Callable[[], torch.Tensor]:
    return lambda: next(it) * 1


def from_attribute(it: Any) -> Callable[[], torch.Tensor]:
    holder = SimpleNamespace(it=it)
    return lambda: next(holder.it) * 1


def from_queue(it: Any) -> Callable[[], torch.Tensor]:
    return lambda: it.get() * 1


def from_loop(it: Any) -> Callable[[], torch.Tensor]:
    def f() -> torch.Tensor:
        for x in it:
            return x * 1  # type: ignore[no-any-return]
        return torch.zeros(1)

    return f


def from_dict(it: Any) -> Callable[[], torch.Tensor]:
    held = {"it": it}
    return lambda: next(held["it"]) * 1


def from_method(it: Any) -> Callable[[], torch.Tensor]:
    take = it.__next__ if hasattr(it, "__next__") else it.get
    return lambda: take() * 1


def first(held: list[torch.Tensor]) -> torch.Tensor:
    return held[0]


def loader() -> Iterator[torch.Tensor]:
    return map(first, iter(DataLoader(TensorDataset(torch.arange(float(COUNT))))))


MADE: dict[str, Callable[[], Any]] = {
    "list": lambda: iter(tensors()),
    "cycle": lambda: itertools.cycle(tensors()),
    "chain": lambda: itertools.chain(tensors()[:1], tensors()[1:]),
    "expression": lambda: (x for x in tensors()),
    "generator": yielded,
    "loader": loader,
    "queue": lambda: filled(queue.Queue),
    "simple queue": lambda: filled(queue.SimpleQueue),
}
KNOWN = [
    *itertools.product([from_variable, from_attribute, from_loop], [*MADE][:6]),
    *itertools.product([from_queue], [*MADE][6:]),
]
UNKNOWN = [*itertools.product([from_dict], [*MADE][:6]), *itertools.product([from_method], MADE)]


@pytest.mark.parametrize(("way", "kind"), KNOWN)
def test_iterators_that_the_code_names(way: Callable[[Any], Any], kind: str) -> None:
    """They are refused before they lose an element."""
    it = MADE[kind]()
    with pytest.raises(GraphError, match=r"function takes elements .* as an argument") as caught:
        graph.capture(way(it))()
    assert_equal(caught.value.done, False, "nothing was done")
    f = graph.capture(way(it), outputs="copy", on_fail="eager")
    assert_equal([f().item() for _ in range(5)], [0.0, 1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(("way", "kind"), UNKNOWN)
def test_iterators_that_only_the_call_shows(way: Callable[[Any], Any], kind: str) -> None:
    """The call counts, whose element is gone; no run after it takes another one."""
    it = MADE[kind]()
    with pytest.raises(GraphError, match=r"call has taken elements .* not repeat it") as caught:
        graph.capture(way(it))()
    assert_equal(caught.value.done, True, "the call was made")
    f = graph.capture(way(it), outputs="copy", on_fail="eager")
    assert_equal([f().item() for _ in range(5)], [1.0, 2.0, 3.0, 4.0, 5.0])


def test_iterators_among_the_arguments() -> None:
    it, f = iter(tensors()), lambda it, x: x * next(it)
    with raises(
        GraphError,
        "an argument of the function is an iterator (list_iterator)",
        "list(...) for all",
    ):
        graph.capture(f)(it, torch.ones(1))
    g = graph.capture(f, outputs="copy", on_fail="eager")
    assert_equal([g(it, torch.ones(1)).item() for _ in range(4)], [0.0, 1.0, 2.0, 3.0])


def test_an_eager_part_that_takes_elements() -> None:
    """The runs before the capture would take some too."""
    it = iter(tensors())

    @graph.eager
    def take() -> torch.Tensor:
        return next(it)

    f = graph.capture(lambda: take() * 2, outputs="copy", on_fail="eager")
    assert_equal([f().item() for _ in range(4)], [0.0, 2.0, 4.0, 6.0])


class Feed(torch.nn.Module):
    """A module with a queue that another thread fills; it only mentions it."""

    def __init__(self, made: Any, filled: bool) -> None:
        super().__init__()
        self.made, self.filled = made, filled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple, while another thread puts an element into the queue."""
        if self.filled:
            thread = threading.Thread(target=self.made.put, args=(1,))
            thread.start()
            thread.join()
        take = self.made.get
        return x * 2 if callable(take) else x


@pytest.mark.parametrize(
    ("kind", "filled"),
    [
        (queue.Queue, False),
        (queue.SimpleQueue, False),
        (queue.SimpleQueue, True),
        (multiprocessing.SimpleQueue, False),
    ],
)
def test_queues_that_are_not_taken_from(kind: Any, filled: bool) -> None:
    """Another thread may add to a queue, and queues of processes have no size."""
    f = graph.capture(Feed(kind(), filled), outputs="copy", verify=False)
    assert_equal([f(torch.ones(1)).item() for _ in range(4)], [2.0] * 4)


class Fixed:
    """An iterator over one tensor."""

    def __init__(self) -> None:
        self.x = torch.full((1,), 2.0)

    def __iter__(self) -> "Fixed":
        return self

    def __next__(self) -> torch.Tensor:
        return self.x


class Trainer:
    """An object with iterators that its step does not use."""

    def __init__(self) -> None:
        self.batches, self.more = iter(tensors()), yielded()
        next(self.more)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple."""
        return x * 2


def _not_taken() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    it, fixed, used, some = iter(tensors()), Fixed(), False, tensors()[:3]

    def local(x: torch.Tensor) -> torch.Tensor:
        it = iter(some)
        for y in it:
            x = x + y
        return x - 1

    def returned(x: torch.Tensor) -> torch.Tensor:
        if not used:
            return x * 2
        return x * next(it)

    def raised(x: torch.Tensor) -> torch.Tensor:
        if used:
            raise ValueError
        return x * 2

    return {
        "returned": returned,
        "raised": raised,
        "branch": lambda x: x * next(it) if used else x * 2,
        "asked": lambda x: x * 2 if it is not None else x,
        "object": Trainer().step,
        "own": lambda x: x * next(fixed),
        "local": local,
        "sum": lambda x: x * sum(1 for _ in some[:2]),
    }


@pytest.mark.parametrize("name", _not_taken())
def test_iterators_that_stay(name: str) -> None:
    f, x = graph.capture(_not_taken()[name], outputs="copy", verify=True), torch.ones(1)
    want = 3.0 if name == "local" else 2.0
    assert_equal([f(x).item() for _ in range(4)], [want] * 4)
    assert_equal(graph.report(f)[0]["replays"], 3, "replays")


def test_a_training_step_over_batches() -> None:
    """A step that takes its batches trains on all of them."""

    def trained(captured: Callable[[Any], Any]) -> list[float]:
        batches, weight = itertools.cycle(tensors()[1:4]), torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            (weight * next(batches)).square().sum().backward()
            optimizer.step()

        call, weights = captured(step), []
        for _ in range(7):
            call()
            weights.append(weight.item())
        return weights

    want = trained(lambda f: f)
    assert_equal(trained(lambda f: graph.capture(f, on_fail="eager")), want)


# -- memory that no iterator leads to --------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
def test_other_tensors_at_each_run(verify: bool) -> None:
    """The memory that operators read is compared, whatever has led to it."""
    number, held = HiddenCount(), tensors()
    f = graph.capture(lambda x: x * held[next(number)], verify=verify)
    with raises(GraphError, "operator 0 (aten.mul.Tensor) reads another tensor at each run"):
        f(torch.ones(1))


@pytest.mark.parametrize("written", [False, True])
def test_equal_tensors_are_others(written: bool) -> None:
    number, held = HiddenCount(), [torch.zeros(1) for _ in range(COUNT)]

    def f(x: torch.Tensor) -> torch.Tensor:
        y = held[next(number)]
        return y.add_(x) if written else y + x

    with raises(GraphError, "reads another tensor at each run"):
        graph.capture(f, outputs="copy")(torch.ones(1))


def test_other_arrays_at_each_run() -> None:
    """Tensors of other arrays, and of other numbers."""
    number, x = HiddenCount(), torch.ones(2)
    for f in (
        lambda x: x + torch.from_numpy(np.full(2, float(next(number)))),
        lambda x: x + torch.tensor([1.0, next(number)]),
    ):
        with raises(GraphError, "reads other values at each run"):
            graph.capture(f)(x)


def test_arrays_of_constants() -> None:
    """Each run makes a tensor of the same numbers."""
    array = np.ones(3)
    ways = {
        "same array": lambda x: x + torch.from_numpy(array),
        "other array": lambda x: x + torch.from_numpy(np.ones(3)),
        "view": lambda x: x + torch.as_tensor(np.ones(6))[3:],
        "literal": lambda x: x + torch.tensor([1.0, 1.0, 1.0]),
    }
    for name, way in ways.items():
        f = graph.capture(way, outputs="copy", verify=True)
        for _ in range(4):
            assert_equal(f(torch.ones(3)).tolist(), [2.0] * 3, name)
        assert_equal(graph.report(f)[0]["replays"], 3, name)


def test_random_choices() -> None:
    """A generator that the program holds is not drawn from at replays."""
    draw, held = random.Random(0), tensors()
    with raises(GraphError, "draws from Python's or NumPy's generator"):
        graph.capture(lambda: draw.choice(held) * 1, verify=False)()
    other, f = random.Random(0), graph.capture(lambda: draw.choice(held) * 1, on_fail="eager")
    assert_equal([f().item() for _ in range(6)], [other.choice(held).item() for _ in range(6)])


# -- verified calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("on_fail", ["raise", "eager"])
def test_other_tensors_are_no_noise(on_fail: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A function that begins to read others differs from its graph."""
    number, held, begun = HiddenCount(), tensors(), HiddenCount()

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * held[next(number) if next(begun) > 6 else 0]

    g = graph.capture(f, outputs="copy", verify=True, on_fail=on_fail)
    for _ in range(4):
        g(torch.ones(1))
    words = "operator 0 (aten.mul.Tensor) reads another tensor at each run"
    if on_fail == "raise":
        with raises(GraphError, "the replay differs from the eager call", words):
            g(torch.ones(1))
        return
    assert_equal(g(torch.ones(1)).item(), 1.0, "the eager result")
    assert words in caplog.text


def test_what_is_not_compared_any_more(caplog: pytest.LogCaptureFixture) -> None:
    """One warning names it."""
    number, begun = HiddenCount(), HiddenCount()

    def f(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x * 2, next(number) if next(begun) > 3 else 0

    g = graph.capture(f, outputs="copy", verify=True)
    with caplog.at_level(logging.WARNING, "commlib"):
        for _ in range(6):
            g(torch.ones(1))
    assert_equal(caplog.text.count("do not compare these any more: output 1"), 1, "warnings")
