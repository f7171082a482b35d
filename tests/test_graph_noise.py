"""Functions that give other bits each time, and what it leaves to run one once more."""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.backends.base import CpuRecording
from commlib.tools.bench.pipeline import Block, Size
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.hidden import HiddenCount
from tests.support.runs_on import runs_on
from tests.test_graph_verify import Hidden

X = torch.ones(3)


def shaken(y: torch.Tensor, number: int) -> torch.Tensor:
    """Change the last bits of the first element, as no operator shows."""
    ctypes.memset(y.data_ptr(), number % 251 + 1, 1)
    return y


def test_one_noisy_output_hides_no_other() -> None:
    hidden, numbers = Hidden(), HiddenCount()

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * hidden.scale, shaken(x * 3, next(numbers))

    g = graph.capture(f, outputs="copy", verify=True)
    for turn in range(4):
        one, other = g(X)
        assert_bits_equal(one, X * 2, f"turn {turn}")
        assert_bits_equal(other, X * 3, f"turn {turn}", atol=1e-3)
    assert_equal(graph.report(g)[0]["repeats"], False)
    hidden.scale = 5.0
    with pytest.raises(GraphError, match=r"output 0 differs at element 0: 5\.0, and replayed 2\.0"):
        g(X)


@pytest.mark.parametrize(("often", "period"), [(True, 11), (False, 5)])
def test_noise_that_is_seldom(often: bool, period: int) -> None:
    """A number differs in one of some runs; noise may reach it from one that always differs."""
    numbers = HiddenCount()

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        number, one, other = next(numbers), x * 2, x * 3
        one = shaken(one, number) if often else one
        return one, other if number % period else shaken(other, 1)

    g = graph.capture(f, outputs="copy", verify=True)
    for turn in range(20):
        one, other = g(X)
        assert_bits_equal(one, X * 2, f"turn {turn}", atol=1e-3)
        assert_bits_equal(other, X * 3, f"turn {turn}", atol=1e-3)
    assert_equal(graph.report(g)[0]["repeats"], False)


@pytest.mark.parametrize("numbers", [None, 0])
def test_noise_of_the_verified_run_alone(numbers: int | None) -> None:
    """A few last digits are noise; another number is not, though no further run gives it.

    An operator with a generator may draw no ``numbers`` from it, as attention without dropout does.
    """
    hidden = Hidden()

    def f(x: torch.Tensor) -> torch.Tensor:
        y, scale = x * 2, hidden.scale
        if numbers is not None:
            torch.rand(numbers)
        hidden.scale = 2.0
        return y if scale == 2.0 else shaken(y, 1) if scale == 1.0 else y * scale

    hidden.scale = 2.0
    g = graph.capture(f, outputs="copy", verify=True)
    for scale in (2.0, 2.0, 1.0, 2.0):
        hidden.scale = scale
        assert_bits_equal(g(X), X * 2, f"scale {scale}", atol=1e-3)
    assert_equal(graph.report(g)[0]["repeats"], False)
    hidden.scale = 3.0
    with pytest.raises(GraphError, match=r"output 0 differs at element 0: 6\.0, and"):
        g(X)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda _: None,
    "a generator that gives no numbers": lambda _: torch.rand(0),
    "a generator": lambda _: torch.rand(3),
    "memory": lambda total: total.add_(1),
}


def check_changes(changes: str, total: torch.Tensor, calls: int) -> None:
    """Check that as many calls have changed ``total`` or the generator, whose seed was 0."""
    assert_equal(total.item(), calls if changes == "memory" else 0, "calls that count")
    state = torch.get_rng_state()
    torch.manual_seed(0)
    for _ in range(calls):
        CHANGES[changes](torch.zeros(1))
    assert_bits_equal(torch.get_rng_state(), state, "the generator")


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("many", [False, True])
def test_noise_of_one_replay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, many: bool, changes: str
) -> None:
    """Last digits that one replay gave, and not the next, are a warning; more is an error.

    The second replay begins from where the call ended, and is undone.
    """
    hidden, total = Hidden(), torch.zeros(1)
    replay, places = CpuRecording.replay, ctypes.c_int64()
    torch.manual_seed(0)

    def noisy(recording: CpuRecording) -> None:
        replay(recording)
        if hidden.scale == 3.0:
            ctypes.memset(graphs_own, 1, 4 if many else 1)
            hidden.scale = 2.0

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        places.value = y.data_ptr()
        CHANGES[changes](total)
        return y

    g = graph.capture(f, outputs="copy", verify=True)
    g(X)
    graphs_own = places.value
    monkeypatch.setattr(CpuRecording, "replay", noisy)
    assert_bits_equal(g(X), X * 2, "a verified call")
    hidden.scale = 3.0
    if many:
        with pytest.raises(GraphError, match="output 0 differs at element 0"):
            g(X)
        check_changes(changes, total, 3)
        return
    with caplog.at_level(logging.WARNING, "commlib"):
        assert_bits_equal(g(X), X * 2, "a verified call with noise")
    assert "gave other last digits once (output 0 differs at element 0" in caplog.text
    check_changes(changes, total, 3)
    assert_bits_equal(g(X), X * 2, "the next one")
    assert_equal(graph.report(g)[0]["repeats"], True)
    check_changes(changes, total, 4)


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("grads", [False, True])
def test_a_graph_that_is_always_wrong(
    monkeypatch: pytest.MonkeyPatch, grads: bool, changes: str
) -> None:
    """Its last digits differ again, also where another slot of a function is right."""
    weight, places = torch.full((3,), 2.0, requires_grad=grads), ctypes.c_int64()
    replay, wrong, total = CpuRecording.replay, list[CpuRecording](), torch.zeros(1)
    torch.manual_seed(0)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * weight
        places.value = y.data_ptr()
        CHANGES[changes](total)
        return y

    g = graph.capture(f, outputs="copy", verify=True)
    g(X)
    graphs_own = places.value

    def noisy(recording: CpuRecording) -> None:
        replay(recording)
        wrong.append(recording)
        if recording is wrong[0]:
            ctypes.memset(graphs_own, 1, 1)

    monkeypatch.setattr(CpuRecording, "replay", noisy)
    with pytest.raises(GraphError, match="output 0 differs at element 0"):
        g(X)
    assert_equal(len(wrong), 1 if grads else 2, "replays of the wrong graph, or of any slot")
    check_changes(changes, total, 2)


def test_other_memory_in_further_runs() -> None:
    """It is not noise, though the first further run and the graph read the same memory."""
    one, other, total = torch.tensor(2.0), torch.tensor(2.0001), torch.zeros(1)
    reads = iter([*[one] * 4, other, one, other, *[one] * 100])

    def f(x: torch.Tensor, reads: Iterator[torch.Tensor] = reads) -> torch.Tensor:
        total.add_(1)
        return x * next(reads)

    g = graph.capture(f, outputs="copy", verify=True)
    for turn in range(2):
        assert_bits_equal(g(X), X * 2, f"turn {turn}")
    with pytest.raises(GraphError, match="output 0 differs"):
        g(X)


def test_a_branch_of_python_that_comes_once() -> None:
    """Its last digits are not noise; a second replay from where the call ended would not differ."""

    state = SimpleNamespace(mode=1)

    def f(x: torch.Tensor) -> torch.Tensor:
        scale = 2.0001 if state.mode == 9 else 2.0
        state.mode = 2
        return x * scale

    g = graph.capture(f, outputs="copy", verify=True)
    for turn in range(1, 4):
        state.mode = 1
        assert_bits_equal(g(X), X * 2, f"turn {turn}")
    state.mode = 9
    with pytest.raises(GraphError, match="output 0 differs at element 0"):
        g(X)
    assert_equal(state.mode, 2)


@runs_on("gpu_ranks")
def test_attention_over_many_tokens(comm: Any) -> None:
    """Its backward adds up in any order: a few gradients differ in most runs, most in a few."""
    torch.manual_seed(0)
    size = Size()
    blocks = torch.nn.Sequential(*(Block(size) for _ in range(3))).to(comm.device, torch.bfloat16)
    x = torch.randn(1, size.length, size.width, device=comm.device, dtype=torch.bfloat16)
    coming = torch.randn_like(x) / 1000
    g = graph.capture(blocks, outputs="copy", verify=True)
    for _ in range(9):
        g(x).backward(coming)
        blocks.zero_grad()
    assert_equal(graph.report(g)[0]["verified"], 16, "verified forwards and backwards")


def test_a_noisy_output_that_is_another_number() -> None:
    """It is compared by half of its digits, as soon as it is known to be noise."""
    hidden, numbers = Hidden(), HiddenCount()
    g = graph.capture(lambda x: shaken(x * hidden.scale, next(numbers)), verify=True)
    for _ in range(3):
        assert_bits_equal(g(X), X * 2, atol=1e-3)
    hidden.scale = 2.5
    with pytest.raises(GraphError, match="output 0 differs"):
        g(X)


def test_a_tolerance() -> None:
    hidden, numbers = Hidden(), HiddenCount()
    f = lambda x: shaken(x * hidden.scale, next(numbers))  # noqa: E731
    close_enough = graph.capture(f, outputs="copy", tolerance=(1e-3, 1e-3))
    for _ in range(4):
        assert_bits_equal(close_enough(X), X * 2, atol=1e-3)
    assert_equal(graph.report(close_enough)[0]["verified"], 2, "verified")
    far = graph.capture(f, outputs="copy", tolerance=(1e-3, 1e-3))
    far(X)
    hidden.scale = 3.0
    with pytest.raises(GraphError, match="output 0 differs at element"):
        far(X)


class Shaking(torch.autograd.Function):
    """A product whose gradient is noisy."""

    numbers = HiddenCount()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return shaken(grad * ctx.scale, next(Shaking.numbers)), None


def shake(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Apply ``Shaking``."""
    result: torch.Tensor = Shaking.apply(x, scale)  # type: ignore[no-untyped-call]
    return result


def test_a_noisy_backward_hides_no_forward() -> None:
    hidden = Hidden()
    g = graph.capture(lambda x: shake(x, hidden.scale), outputs="copy", verify=True)
    for turn in range(4):
        x = X.clone().requires_grad_()
        out = g(x)
        assert_bits_equal(out.detach(), X * 2, f"turn {turn}")
        out.sum().backward()
        assert_bits_equal(x.grad, X * 2, f"gradient of turn {turn}", atol=1e-3)
    hidden.scale = 5.0
    with pytest.raises(GraphError, match=r"output 0 differs at element 0: 5\.0"):
        g(X.clone().requires_grad_())


def test_what_further_runs_leave() -> None:
    """Gradients and lists are those of the one call that counts, also where a later run fails."""
    hidden, log, weight = Hidden(), list[float](), torch.ones(3, requires_grad=True)

    def logged(x: torch.Tensor) -> torch.Tensor:
        if hidden.scale > 2:
            log.append(hidden.scale)
            if len(log) > 1:
                raise IndexError("the second time")
        weight.grad = None
        (weight * x).sum().backward()
        return x * hidden.scale

    g = graph.capture(logged, outputs="copy", on_fail="eager", verify=True)
    weight.grad = torch.zeros(3)
    for turn in range(1, 4):
        assert_bits_equal(g(X * turn), X * 2 * turn, f"turn {turn}")
        assert_bits_equal(weight.grad, X * turn, f"gradient of turn {turn}")
    hidden.scale = 5.0
    assert_bits_equal(g(X * 4), X * 20, "the call that differs")
    assert_bits_equal(weight.grad, X * 4, "its gradient")
    assert_equal(log, [5.0], "its list")


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nan": lambda x: (x * 2, float("nan"), np.float32("nan"), complex("nan")),
    "array": lambda x: (x * 2, np.arange(3)),
    "object": lambda x: (x * 2, object()),
    "function": lambda x: (x * 2, lambda: None),
    "conjugate": lambda x: (x.to(torch.complex64) * 2).conj(),
}


@pytest.mark.parametrize("what", RESULTS)
def test_results_that_are_compared(what: str, caplog: pytest.LogCaptureFixture) -> None:
    g = graph.capture(RESULTS[what], outputs="copy", verify=True)
    with caplog.at_level(logging.INFO, "commlib"):
        for _ in range(4):
            g(X)
    assert_equal((graph.report(g)[0]["repeats"], graph.report(g)[0]["verified"]), (True, 3))
    assert "other bits" not in caplog.text


def test_names_that_are_bound() -> None:
    """They are compared, are the function's own where that is kept, and no graph writes to them."""
    hidden = Hidden()

    class State:
        h = torch.zeros(3)

    state, saved = State(), list[torch.Tensor]()

    def f(x: torch.Tensor) -> torch.Tensor:
        state.h = x * hidden.scale
        return x + 1

    g = graph.capture(f, verify=2)
    for turn in range(1, 6):
        g(X * turn)
        saved.append(state.h)
    assert_bits_equal(torch.stack(saved), torch.stack([X * 2 * turn for turn in range(1, 6)]))
    hidden.scale = 5.0
    g(X)
    with pytest.raises(GraphError, match=r"binds, leaf 0 differs .* 5\.0, and replayed 2\.0"):
        g(X)
    assert_bits_equal(state.h, X * 5, "the eager effects are kept")


def test_noise_of_one_name_hides_no_other() -> None:
    """Also where a call changes fewer names than the one before."""
    numbers, noisy, other = HiddenCount(), threading.Event(), threading.Event()
    state = SimpleNamespace(mode=1, a=None, b=None)

    def f(x: torch.Tensor) -> torch.Tensor:
        state.mode = 2
        state.a = shaken(x * 1, next(numbers)) if noisy.is_set() else x * 1
        state.b = x * (2.00001 if other.is_set() else 2)
        return x + 1

    g = graph.capture(f, outputs="copy", verify=True)
    for turn in range(4):
        state.mode = 1
        if turn == 3:
            noisy.set()
        assert_bits_equal(g(X), X + 1, f"turn {turn}")
    assert_equal(graph.report(g)[0]["repeats"], False, "whether a has other bits each time")
    noisy.clear()
    other.set()  # two names change now, and three did
    with pytest.raises(GraphError, match=r"SimpleNamespace\.b, which the function binds"):
        g(X)


def test_a_call_that_differs_counts_each_write_once() -> None:
    """Memory is written through a tensor and a view of it, and read by the backward."""
    total, weight, more = torch.zeros(3), torch.ones(3, requires_grad=True), threading.Event()

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            total.add_(x)
            total[0] = 7.0
            if more.is_set():
                total.mul_(2)
        return weight * total

    g = graph.capture(f, outputs="copy", verify=True, on_fail="eager")
    for _ in range(4):
        g(X).sum().backward()
    before = total._version
    more.set()
    out = g(X)
    assert_equal(total._version - before, 3, "writes")
    weight.grad = None
    out.sum().backward()
    assert_bits_equal(weight.grad, total)


def test_gradients_that_non_leaves_keep() -> None:
    base = torch.ones(3, requires_grad=True)
    g = graph.capture(lambda x: x.sin(), outputs="copy", verify=True)
    for turn in range(4):
        x = base * 2
        x.retain_grad()
        g(x).sum().backward()
        assert_bits_equal(x.grad, (X * 2).cos(), f"turn {turn}", atol=1e-6)
