"""Captured functions against eager ones, bit for bit: their state, arguments and outputs."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from commlib import graph, ops
from commlib.errors import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, on_gpu, raises
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on
from tests.test_graph_values import alike

# -- state -----------------------------------------------------------------------------------------


def seeds(comm: Any) -> None:
    """A function that sets a generator is refused, wherever it does so; what it was stays."""

    @contextmanager
    def forked() -> Iterator[None]:
        with torch.random.fork_rng(devices=[comm.device] if on_gpu(comm) else []):
            yield

    def first(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return x + torch.rand_like(x)

    def last(x: torch.Tensor) -> torch.Tensor:
        y = x + torch.rand_like(x)
        torch.manual_seed(3)
        return y

    def inside(x: torch.Tensor) -> torch.Tensor:
        with forked():
            return x + torch.rand_like(x)

    def again(x: torch.Tensor) -> torch.Tensor:  # as the program has just done
        torch.manual_seed(8)
        return x + torch.rand_like(x)

    for fn in (first, last, inside, again):
        refuses_a_seed(fn, comm.device)


def seeds_of_generators(comm: Any) -> None:
    """So is a function that sets the seed of a generator that it is given or makes."""
    rng = torch.Generator(comm.device)

    def of_its_own(x: torch.Tensor) -> torch.Tensor:
        rng.manual_seed(8)
        return x + torch.rand(3, generator=rng, device=x.device)

    def made(x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(x.device).manual_seed(8)
        return x + torch.rand(3, generator=generator, device=x.device)

    for fn in (of_its_own, made):
        refuses_a_seed(fn, comm.device)


def refuses_a_seed(fn: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    x = torch.zeros(3, device=device)
    torch.manual_seed(8)
    want = torch.rand_like(x)
    torch.manual_seed(8)
    with raises(GraphError, "sets a generator"):
        graph.capture(fn)(x)
    assert_bits_equal(torch.rand_like(x), want, "drawn after")


def eager_draws(comm: Any) -> None:
    """An eager part may draw where no operator of the graph shows it."""
    draw: Any = graph.eager(lambda x: x + torch.rand_like(x))

    def between(x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(draw(torch.dropout(x + 1, 0.5, True)), 0.5, True)

    drawing = graph.capture(between, outputs="copy")
    x = torch.zeros(3, device=comm.device)
    assert_equal(tuple(drawing(x).shape), (3,), "drawn where no operator shows it")


def rebound(comm: Any) -> None:
    """State under a name that each call binds again can't be replayed; a table that is kept can."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = torch.zeros(1, device=comm.device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + x
            return self.count * 1

    class Table(nn.Module):
        table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.arange(3.0, device=x.device)
            return x + self.table

    with raises(GraphError, "state = state +", "add_"):
        graph.capture(Counter())(torch.ones(1, device=comm.device))
    with raises(GraphError, "state = state +"):
        graph.capture(Counter(), first="warmup")(torch.ones(1, device=comm.device))
    call = graph.capture(Table(), warmup=3)
    for turn in range(3):
        x = torch.full((3,), float(turn), device=comm.device)
        assert_bits_equal(call(x), x + torch.arange(3.0, device=comm.device), f"turn {turn}")


def shared(comm: Any) -> None:
    """An argument in memory that the function uses without being given it: right, or refused."""
    buffer = torch.arange(5.0, device=comm.device)

    def write(x: torch.Tensor) -> torch.Tensor:
        buffer.add_(1)
        return x * 2

    def read(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return buffer * 2

    for fn in (write, read):
        call = graph.capture(fn, outputs="copy")
        for start in (0, 1, 2):
            before = buffer.clone()
            want = fn(buffer[start : start + 2]).clone()
            left = buffer.clone()
            buffer.copy_(before)
            try:
                assert_bits_equal(
                    call(buffer[start : start + 2]), want, f"{fn.__name__} at {start}"
                )
                assert_bits_equal(buffer, left, f"{fn.__name__} at {start}: the buffer")
            except GraphError as error:
                assert_equal("without receiving it" in str(error), True, str(error))
                break
    table = torch.zeros(2, 4, device=comm.device)
    call = graph.capture(lambda x: x + table[1].add_(1), outputs="copy")
    for turn in range(3):  # another place of the same memory
        assert_bits_equal(call(table[0]), torch.full((4,), turn + 1.0), f"during, turn {turn}")


def containers(comm: Any) -> None:
    x = torch.ones(1, device=comm.device)

    def put(found: dict[str, torch.Tensor]) -> None:
        found["y"] = found["x"] * 2

    def append(found: list[torch.Tensor]) -> None:
        found.append(found[0] * 2)

    arguments: list[tuple[Any, Any]] = [(put, {"x": x}), (append, [x])]
    for fn, arg in arguments:
        with raises(GraphError, "changes a list or dict"):
            graph.capture(fn)(arg)
        assert_equal(len(arg), 1, "as before")


# -- arguments and outputs -------------------------------------------------------------------------


def strides(comm: Any) -> None:
    """Arguments keep their strides: an order of summing, and a branch, may depend on them."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(5)
        table = torch.randn(64, 200).to(comm.device)
        call = captured(lambda x: (x.sum(), x.stride()[0] * (x * 2)))
        results = []
        for start in range(3):
            inputs = [
                table[:, start::2][:, :90],
                table[:, start],
                table[start].expand(7, 200),
                table.t()[start : start + 9],
                table.view(-1)[start : start + 90].unfold(0, 10, 3),
                table[start:start],
            ]
            results += [part.clone() for x in inputs for part in call(x)]
        return results

    alike(program, "strides")


class Cache:
    """An object of a program, as caches of transformers are: rows of tensors, and numbers."""

    def __init__(self, rows: list[Any], count: int) -> None:
        self.rows, self.count = rows, count
        self.settings = SETTINGS


SETTINGS = SimpleNamespace(size=3)


def objects(comm: Any) -> None:
    """An object around tensors is a new one at each replay, as the function makes it."""
    y = torch.zeros(2, device=comm.device)
    outside = SimpleNamespace(y=y)

    def program(captured: Callable[..., Any]) -> list[Any]:
        weight = torch.ones(2, device=comm.device, requires_grad=True)

        def step(x: torch.Tensor) -> Any:
            cache = Cache([SimpleNamespace(key=x * weight, value=y), {"more": (x + 1, y)}], 2)
            return {"cache": cache, "total": cache.rows[0].key.sum()}

        call, results = captured(step), list[Any]()
        for turn in range(4):
            out = call(torch.full((2,), turn + 1.0, device=comm.device))
            cache = out["cache"]
            assert_equal((type(cache), cache.count, cache.settings is SETTINGS), (Cache, 2, True))
            assert_equal(cache.rows[0].value is y, True, "a tensor from outside")
            cache.rows.append(turn)  # no part of the next one
            assert_equal(len(cache.rows), 3, "rows")
            cache.rows[0].key.square().sum().backward()
            results += [cache.rows[0].key, cache.rows[1]["more"][0], out["total"], weight.grad]
            results = [x.detach().clone() for x in results]
            weight.grad = None
        return results

    alike(program, "objects")
    graphed = graph.capture(lambda x: (outside, x * 2))
    for _ in range(3):
        assert_equal(graphed(y)[0] is outside, True, "an object from outside")


def hiding(comm: Any) -> None:
    """What no replay could fill again is refused."""

    def run(x: torch.Tensor) -> Any:
        yield x * 2

    def round_about(x: torch.Tensor) -> Any:
        cyclic = SimpleNamespace(y=x * 2)
        cyclic.itself = cyclic
        return cyclic

    x = torch.ones(2, device=comm.device)
    with raises(GraphError, "holds itself"):
        graph.capture(round_about)(x)
    for fn in (lambda x: [{"y": {(x * 2, 1)}}], run):
        with raises(GraphError, "register_pytree_node"):
            graph.capture(fn)(x)


def own_operators(comm: Any) -> None:
    """Losses and embeddings that look at labels leave that out in a capture, on a CPU too."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(4)
        weight = torch.randn(8, 4).to(comm.device)

        def step(ids: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> Any:
            rows = ops.vocab_parallel_embedding(ids, weight, 8 * comm.rank, vocab_size=16)
            return rows, ops.softmax_with_cross_entropy(logits, labels)

        call, results = captured(step), list[Any]()
        for turn in range(4):
            ids = torch.arange(5, device=comm.device) * (turn + 1) % 16
            logits = torch.linspace(turn, 1, 40).view(5, 8).to(comm.device)
            results += [x.clone() for x in call(ids, logits, ids.view(5, 1))]
        return results

    alike(program, "own operators")


def keys(comm: Any) -> None:
    """Values that compare as equal, and act otherwise, are other kinds of calls."""
    x = torch.ones(1, device=comm.device)
    sign = graph.capture(lambda x, c: x * math.copysign(1, c.imag))
    assert_equal(
        [float(sign(x, c)) for c in (0j, complex(0, -0.0), 0j)], [1.0, -1.0, 1.0], "complex"
    )
    other = graph.capture(lambda x, c: x * math.copysign(1, c))
    results = [float(other(x, c)) for c in (np.float32(0), np.float32(-0.0))]
    assert_equal(results, [1.0, -1.0], "numpy")
    mode: Any = 1
    by_key = graph.capture(lambda x: x * (2 if mode is True else 3), key=lambda x: (mode,))
    first = float(by_key(x))
    mode = True
    assert_equal((first, float(by_key(x))), (3.0, 2.0), "key=")
    drop: Any = nn.Dropout(0.5)
    as_argument = graph.capture(lambda module, x: module(x) * 1)
    as_method = graph.capture(drop.forward)
    ones = torch.ones(64, device=comm.device)
    calls: list[Callable[[], Any]] = [lambda: as_argument(drop, ones), lambda: as_method(ones)]
    for call in calls:
        drop.train()
        assert_equal(bool((call() == 0).any()), True, "training")
        drop.eval()
        assert_bits_equal(call(), ones, "evaluation")
    typed = graph.capture(lambda x: torch.full((2,), 1.5, device=x.device))
    before = torch.get_default_dtype()
    try:
        dtypes = [typed(x).dtype]
        torch.set_default_dtype(torch.float64)
        dtypes.append(typed(x).dtype)
    finally:
        torch.set_default_dtype(before)
    assert_equal(dtypes, [torch.float32, torch.float64], "default dtype")


def reads(comm: Any) -> None:
    """On a CPU values can be read past torch's operators."""
    x = torch.ones(2, device=comm.device)
    ways: list[Callable[[torch.Tensor], Any]] = [
        lambda x: x * sum(x.tolist()),
        lambda x: x * float(x.cpu().numpy()[0]),
        lambda x: x * float(np.asarray(x.cpu())[0]),
        lambda x: x + torch.from_dlpack(x.cpu()).sum(),
    ]
    for way in ways:
        with raises(GraphError, "can't be captured"):
            graph.capture(way)(x)


def eager_parts(comm: Any) -> None:
    """An eager part that returns something else than at the capture is reported."""
    total: Any = graph.eager(lambda x: sum(x.tolist()))
    pick: Any = graph.eager(lambda x: x[x > 1])
    x = torch.tensor([2.0, 3.0, 0.0], device=comm.device)
    times = graph.capture(lambda x: x * total(x), outputs="copy")
    some = graph.capture(lambda x: pick(x).sum(), outputs="copy")
    assert_bits_equal(times(x), x * 5, "a value")
    assert_bits_equal(times(x.flip(0)), x.flip(0) * 5, "the same one")
    with raises(GraphError, "an eager part", "key="):
        times(x + 1)
    assert_equal([float(some(x)), float(some(x.flip(0)))], [5.0, 5.0], "a shape")
    with raises(GraphError, "an eager part"):
        some(x + 2)


def shapes(comm: Any) -> None:
    """Indices that are not masks are fine, and so are own tensors that get another shape."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        rows = torch.tensor([2, 0], device=comm.device)
        index = captured(lambda x: (x[rows], x + 1 if on_gpu(comm) else x[[1, 0]]))

        def reshaped(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y.unsqueeze_(0)
            return (y.squeeze_(0).t_() + 1).unsqueeze_(2)

        call = captured(reshaped)
        tables = [torch.arange(6.0, device=comm.device).view(3, 2) + turn for turn in range(3)]
        results = [part.clone() for x in tables for part in index(x)]
        return results + [call(x).clone() for x in tables]

    alike(program, "shapes")
    x = torch.ones(3, device=comm.device)
    with raises(GraphError, "unsqueeze_", "from outside"):
        graph.capture(lambda x: x.unsqueeze_(0) * 2)(x)
    assert_equal(tuple(x.shape), (3,), "as before")


@runs_on("cpu_ranks")
def test_literals(comm: Any) -> None:
    """A tensor that is written down in a function is new at each call, on a CPU."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        def step(x: torch.Tensor) -> Any:
            total, other = torch.tensor([0.0, 1.0]), x.new_tensor([2.0, 3.0])
            total += x
            other *= x
            return total * 1, other + 0

        call = captured(step)
        return [part.clone() for _ in range(3) for part in call(torch.full((2,), 2.0))]

    alike(program, "literals")
    array = np.zeros(2, np.float32)
    with raises(GraphError, "writes to an array"):
        graph.capture(lambda x: torch.as_tensor(np.zeros(2, np.float32)).add_(x))(torch.ones(2))
    read = graph.capture(lambda x: x + torch.from_numpy(array))
    for turn in range(3):
        array += 1
        assert_bits_equal(
            read(torch.ones(2)), torch.full((2,), turn + 2.0), "an array that is read"
        )


@runs_on("gpu_ranks")
def test_literals_on_a_gpu(comm: Any) -> None:
    """A tensor that is written down in a function is new at each call, on a GPU too."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        def step(x: torch.Tensor) -> Any:
            total, other = torch.tensor([0.0, 1.0], device=x.device), x.new_tensor([2.0, 3.0])
            total += x
            other *= x
            return total * 1, other + torch.ones(2).to(x.device), x.copy_(torch.full((2,), 2.0))

        call = captured(step)
        x = torch.full((2,), 2.0, device=comm.device)
        return [part.clone() for _ in range(3) for part in call(x)]

    alike(program, "literals")


@runs_on("cpu_ranks")
def test_recurrent(comm: Any) -> None:
    """On the CPU alone: cuDNN's own kernels are not business of the recording engine."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(6)
        module = nn.LSTM(3, 4)
        call, results = captured(module), []
        for _ in range(3):
            x = torch.randn(5, 2, 3)
            y, (h, c) = call(x)
            (y.sum() + h.sum() * 2 + c.sum()).backward()
            results += [y.detach().clone(), h.detach().clone(), c.detach().clone()]
        return results + [weight.grad for weight in module.parameters()]

    alike(program, "LSTM")


@runs_on("unified_ranks")
def test_one_hot(comm: Any) -> None:
    """one_hot with a number of classes, whose check of the values is a part of each call."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(x, 4) * 2

    g = graph.capture(f, outputs="copy")
    for turn in range(4):
        x = torch.tensor([[turn, 1], [2, 3 - turn]], device=comm.device)
        assert_equal(torch.equal(g(x), f(x)), True, f"turn {turn}")
    assert_equal(graph.report(g)[0]["replays"], 3, "replays")


@runs_on("cpu_ranks")
def test_one_hot_of_a_class_that_does_not_exist(comm: Any) -> None:
    g = graph.capture(lambda x: torch.nn.functional.one_hot(x, 4) * 2, outputs="copy")
    for _ in range(3):
        g(torch.tensor([[1, 1], [3, 0]]))
    assert_equal(graph.report(g)[0]["replays"], 2, "replays")
    with raises(RuntimeError, "out of bounds"):
        g(torch.tensor([[1, 1], [4, 1]]))


@runs_on("unified_ranks")
def test_arguments_that_are_made_to_want_a_gradient(comm: Any) -> None:
    """A function that makes an argument want a gradient is refused, or eager at every call."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.requires_grad_() * 2).detach()

    def given(turn: int) -> torch.Tensor:
        return torch.full((3,), float(turn), device=comm.device)

    with raises(GraphError, "sets requires_grad of tensor 0 of its arguments to True"):
        graph.capture(f)(given(1))
    g = graph.capture(f, on_fail="eager")
    for turn in range(4):
        x = given(turn)
        assert_bits_equal(g(x), given(turn) * 2, f"turn {turn}")
        assert_equal(x.requires_grad, True, "the argument")
    assert_equal(
        (len(g.entries), len(graph.report(g))), (0, 2), "graphs, and kinds that stay eager"
    )


CASES = (
    seeds,
    seeds_of_generators,
    eager_draws,
    rebound,
    shared,
    containers,
    strides,
    objects,
    hiding,
    own_operators,
    keys,
    reads,
    eager_parts,
    shapes,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_values(unified_ranks: Ranks, case: Callable[[Any], None]) -> None:
    unified_ranks(case)
