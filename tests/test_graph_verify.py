"""Verified replays: a graph that differs from its function is found, and the function counts."""

import ctypes
from collections.abc import Callable
from ctypes import c_double
from typing import Any

import pytest
import torch

import commlib
from commlib import graph
from commlib.errors import GraphError
from commlib.graph.replaying.nodes import used_up
from commlib.graph.watching import digest, effects
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on


class Hidden:
    """A number where no key looks: a number of ctypes holds it."""

    def __init__(self) -> None:
        self._number = c_double(2.0)

    @property
    def scale(self) -> float:
        """The number."""
        return self._number.value

    @scale.setter
    def scale(self, number: float) -> None:
        self._number.value = number


def scaled(comm: Any) -> tuple[Hidden, Callable[..., Any], torch.Tensor]:
    """Return a hidden number, a function that reads it, and memory that the function writes."""
    hidden, total = Hidden(), torch.zeros(3, device=comm.device)

    def f(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return x * hidden.scale

    return hidden, f, total


@runs_on("unified_ranks")
def test_a_number_that_changes(comm: Any) -> None:
    """A number that has changed is named, with the operator that reads it; the call counts once."""
    hidden, f, total = scaled(comm)
    x = torch.ones(3, device=comm.device)
    g = graph.capture(f, outputs="copy")
    assert_bits_equal(g(x), x * 2, "the call")
    hidden.scale = 5.0
    words = "aten.mul.Tensor(2.0) at the capture, and is aten.mul.Tensor(5.0) now"
    with raises(GraphError, "output 0 differs at element 0: 5.0, and replayed 2.0", words):
        g(x)
    assert_bits_equal(total, x * 2, "the eager effects are kept")
    assert_bits_equal(g(x), x * 5, "captured again")
    assert_bits_equal(total, x * 3, "and counts once")


@runs_on("unified_ranks")
def test_writes_that_come_later(comm: Any) -> None:
    """What the function has come to write, and the graph does not, is found."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    hidden, total = Hidden(), torch.zeros(3, device=comm.device)

    def f(x: torch.Tensor) -> torch.Tensor:
        if hidden.scale == 5.0:
            total.add_(x)
        if hidden.scale == 7.0:
            weight.grad = None
        return x * weight.detach()

    x = torch.ones(3, device=comm.device)
    for scale, words in (
        (5.0, "a (3,) torch.float32 tensor from outside is written by the function"),
        (7.0, "grad of a (3,) tensor is another one after the function"),
    ):
        hidden.scale = 2.0
        weight.grad = torch.ones_like(weight)
        g = graph.capture(f, outputs="copy")
        g(x)
        hidden.scale = scale
        with raises(GraphError, words):
            g(x)
    assert_bits_equal(total, x, "the eager effects are kept")
    assert_equal(weight.grad, None, "this too")


@runs_on("cpu_ranks")
def test_writes_past_operators(comm: Any) -> None:
    """Memory that something writes past all operators is found at the first call."""
    total, x = torch.zeros(64), torch.ones(3)

    def f(x: torch.Tensor) -> torch.Tensor:
        numbers = (ctypes.c_float * 64).from_address(total.data_ptr())
        numbers[7] += 1
        return x * 2

    with raises(GraphError, "writes 256 bytes", "no operator of torch says so", "were kept"):
        graph.capture(f)(x)
    assert_equal(total.sum().item(), 1.0, "the call counts once")
    g = graph.capture(f, on_fail="eager")
    for turn in range(3):
        assert_bits_equal(g(x), x * 2, f"turn {turn}")
        assert_equal(total.sum().item(), turn + 2.0, "eager calls count once")


@runs_on("unified_ranks")
def test_eager_from_then_on(comm: Any) -> None:
    """With on_fail="eager" each call is right, its backward too, and later ones are eager."""
    hidden, f, total = scaled(comm)
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    g = graph.capture(lambda x: f(x.detach()) * weight, outputs="copy", on_fail="eager")
    x = torch.ones(3, device=comm.device)
    for turn in range(1, 5):
        hidden.scale = 2.0 * turn
        weight.grad = torch.zeros_like(weight)
        y = g(x)
        assert_bits_equal(y, x * hidden.scale, f"turn {turn}")
        y.sum().backward()
        assert_bits_equal(weight.grad, x * hidden.scale, f"turn {turn}, gradient")
        assert_bits_equal(total, x * turn, f"turn {turn}, memory")
    assert_equal((len(g.entries), len(g.eager)), (0, 1), "graphs, and calls that stay eager")


class _Backward(torch.autograd.Function):
    """The identity, whose backward reads a hidden number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, hidden: Hidden) -> torch.Tensor:
        ctx.hidden = hidden
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.hidden.scale, None


@runs_on("unified_ranks")
def test_backwards(comm: Any) -> None:
    """Forward and backward of one call are verified together."""
    for on_fail in ("raise", "eager"):
        hidden = Hidden()
        g = graph.capture(lambda x, h=hidden: _Backward.apply(x, h), on_fail=on_fail)  # type: ignore[no-untyped-call]
        x = torch.ones(3, device=comm.device, requires_grad=True)
        x.grad = torch.zeros_like(x)
        weights = torch.ones_like(x)  # a bare sum has its own backward graph
        (g(x) * weights).sum().backward()
        hidden.scale = 7.0
        y = g(x) * weights
        if on_fail == "raise":
            with raises(GraphError, "gradient 0 differs at element 0: 7.0, and replayed 2.0"):
                y.sum().backward()
        else:
            y.sum().backward()
            assert_bits_equal(x.grad, torch.full((3,), 9.0), "the gradient of the function")
            assert_equal(len(g.eager), 1, "calls that stay eager")


@runs_on("unified_ranks")
def test_members_of_a_ring(comm: Any) -> None:
    """What differs on one rank is an error on all members of the rings, and these go on."""
    hidden = Hidden()
    g = graph.capture(
        lambda x: comm.all_reduce(torch.zeros_like(x), x * hidden.scale), outputs="copy"
    )
    x = torch.ones(3, device=comm.device)
    assert_bits_equal(g(x), x * 2 * comm.size, "the call")
    if comm.rank == 1:
        hidden.scale = 3.0
    words = ("differs at element 0: 5.0, and replayed 4.0",)
    with raises(GraphError, *words):
        g(x)
    hidden.scale = 2.0
    for turn in range(4):
        assert_bits_equal(g(x), x * 2 * comm.size, f"turn {turn}")


def verified_calls(g: Any, calls: int) -> int:
    """Return how many of so many calls were verified."""
    for _ in range(calls):
        g(torch.ones(2))
    return sum(row["verified"] for row in graph.report(g))


@pytest.mark.parametrize(
    ("verify", "expected"),
    [("auto", 4), (None, 4), (True, 100), (False, 0), (0, 0), (7, 14), (100, 1)],
)
def test_schedules(verify: Any, expected: int) -> None:
    """The first call is the function itself; then there are a hundred replays."""
    g = graph.capture(lambda x: x + 1, outputs="copy", verify=verify)
    assert_equal(verified_calls(g, 101), expected, f"verify={verify!r}")
    assert (graph.report(g)[0]["verify_seconds"] > 0) == (expected > 0)


@pytest.mark.parametrize(("text", "expected"), [("auto", 2), ("0", 0), ("1", 5), ("2", 2)])
def test_flag(text: str, expected: int) -> None:
    with commlib.flags.override("FLAGS_graph_verify", text):
        g = graph.capture(lambda x: x + 1, outputs="copy")
    assert_equal(verified_calls(g, 6), expected, text)


@pytest.mark.parametrize("verify", ["often", -1, 1.5])
def test_wrong_schedules(verify: Any) -> None:
    with pytest.raises(GraphError, match="expected 'auto', True, False or a whole number"):
        graph.capture(lambda x: x, verify=verify)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_digests(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changed element is another number, whatever the size."""
    monkeypatch.setattr(digest, "_BLOCK", 8)  # many blocks
    for count in (64, 63, 1, 34, 0):
        x = torch.zeros(count, dtype=dtype)
        memory = [x.untyped_storage()]
        seen = [digest.digests(memory)]
        for i in range(count):
            x[i] = 1
            seen.append(digest.digests(memory))
            x[i] = 0
        assert_equal(digest.digests(memory), seen[0], "the same bits")
        assert_equal(len({each[0] for each in seen}), count + 1, f"numbers of {count} of {dtype}")


def test_what_a_backward_leaves() -> None:
    """Outputs that share a saved tensor with one that went back can't go back any more."""
    x = torch.ones(3, requires_grad=True)
    shared, apart = x.exp(), x.sin()
    loss, more, view = shared.square().sum(), shared * 2, x.view(3, 1)
    for others, want in (
        ([more], True),
        ([apart], False),
        ([more, apart], False),
        ([view], False),
        ([], True),
    ):
        assert_equal(used_up([loss], others), want, f"{len(others)} others")
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        more.sum().backward()
    apart.sum().backward()


def sees_capture() -> bool:
    """Ask as programs do; a torch without CUDA raises outside captures."""
    try:
        return bool(torch.cuda.is_current_stream_capturing())
    except RuntimeError:
        return False


@runs_on("unified_ranks")
def test_functions_that_ask(comm: Any) -> None:
    """A function that asks whether it is captured may take another way for the same numbers."""
    weight = torch.full((3,), 3.0, device=comm.device, requires_grad=True)

    def f(x: torch.Tensor, share: float) -> torch.Tensor:
        if sees_capture():
            return x * weight * share
        return x * weight * float((x * share)[0] / x[0])

    for differentiable in (False, True):
        with torch.set_grad_enabled(differentiable):
            g = graph.capture(f, outputs="copy")
            for turn in range(1, 6):
                x = torch.full((3,), float(turn), device=comm.device)
                actual = g(x, 0.1)
                assert_bits_equal(actual, x.cpu() * 0.3, f"turn {turn}")
                if differentiable:
                    weight.grad = None
                    actual.sum().backward()
                    assert_bits_equal(weight.grad, x.cpu() * 0.1, f"gradient of turn {turn}")
        verified = graph.report(g)[0]["verified"]
        assert_equal(verified, 4 if differentiable else 2, "verified calls and backwards")


@runs_on("unified_ranks")
def test_functions_that_do_something_else_in_a_capture(comm: Any) -> None:
    """One that computes something else in a capture is refused, and its effects are kept."""

    def f(x: torch.Tensor) -> torch.Tensor:
        if sees_capture():
            return x * 3
        return x * (2 if x.sum().item() else 1)

    x = torch.ones(3, device=comm.device)
    g = graph.capture(f, outputs="copy")
    assert_bits_equal(g(x), x * 2, "the call")
    with raises(GraphError, "asks whether it is captured and behaves differently when it is"):
        g(x)
    tamed = graph.capture(f, outputs="copy", on_fail="eager")
    for turn in range(4):
        assert_bits_equal(tamed(x), x * 2, f"turn {turn}")


@runs_on("gpu_ranks")
def test_kernels_that_no_operator_shows(comm: Any) -> None:
    """A kernel of Triton that writes memory from outside, and no operator says so, counts once."""
    from tests.support.triton_kernels import add_one

    total = torch.zeros(128, device=comm.device)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        add_one[(1,)](total, BLOCK=128)
        add_one[(1,)](y, BLOCK=128)
        return x * total[:4]

    x = torch.ones(4, device=comm.device)
    for options in ({}, {"verify": False}, {"first": "warmup"}, {"warmup": 3}):
        total.zero_()
        g = graph.capture(f, outputs="copy", **options)
        for turn in range(1, 12):
            y = torch.full((128,), float(turn), device=comm.device)
            assert_bits_equal(g(x, y), x * turn, f"turn {turn}, {options}")
            assert_bits_equal(y, torch.full((128,), turn + 1.0), "an argument")
        assert_bits_equal(total, torch.full((128,), 11.0), f"the memory, {options}")
        assert_equal((len(g.entries), len(g.eager)), (1, 0), "graphs, and calls that stay eager")


@runs_on("unified_ranks")
def test_ranks_with_other_kinds(comm: Any) -> None:
    """Ranks whose calls are of other kinds verify the same ones, whose collectives meet."""
    g = graph.capture(lambda x, mode: commlib.ops.all_reduce(x) * mode, outputs="copy")
    modes = (1, 2, 1, 1, 2, 2, 1) if comm.rank else (1, 3, 3, 3, 3, 3, 1)
    x = torch.ones(2, device=comm.device)
    for turn, mode in enumerate(modes):
        assert_bits_equal(g(x, mode), x * comm.size * mode, f"turn {turn}")


@runs_on("unified_ranks")
def test_a_rank_that_raises_in_a_verified_call(comm: Any) -> None:
    """A rank whose function raises in a verified call, its collectives made, holds up nobody."""
    hidden = Hidden()

    def g(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = commlib.ops.all_reduce(x)
        if hidden.scale == 5.0 and comm.rank == 1:
            raise ValueError("on one rank")
        return total

    call, x = graph.capture(g, outputs="copy"), torch.ones(3, device=comm.device)
    assert_bits_equal(call(x), x * comm.size, "the first")
    hidden.scale = 5.0
    if comm.rank == 1:
        with raises(ValueError, "on one rank"):
            call(x)
    else:
        assert_bits_equal(call(x), x * comm.size, "the second")
    hidden.scale = 2.0
    for turn in range(3):
        assert_bits_equal(call(x), x * comm.size, f"turn {turn}")


@pytest.mark.parametrize("together", [16, 1 << 26])
def test_exchange(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call has left takes the place of the copies from before it, in the same memory."""
    monkeypatch.setattr(effects, "TOGETHER", together)
    kinds = (torch.float64, torch.bool, torch.int16, torch.bfloat16)
    tensors = [torch.arange(3 + i).to(kind) for i, kind in enumerate(kinds)] + [torch.zeros(0)]
    before, changed = [x.clone() for x in tensors], effects.Effects(tensors, (), ())
    held = changed.now()
    for x in tensors:
        x.add_(1) if x.dtype is not torch.bool else x.logical_not_()
    after = [x.clone() for x in tensors]
    assert held.buffers is not None
    memory = [x.data_ptr() for x in held.buffers]
    assert_equal(len(memory) > 2, together == 16, f"{len(memory)} chunks")
    left = changed.exchange(held)
    for x, want in zip(tensors, before, strict=True):
        assert_bits_equal(x, want, "put back")
    assert left.buffers is not None
    assert_equal([x.data_ptr() for x in left.buffers], memory, "the memory of copies")
    indices = sorted(i for i, _, _ in changed.pairs(left, changed.here()))
    assert_equal(indices, [0, 1, 2, 3], "what differs")
    changed.put(left)
    for x, want in zip(tensors, after, strict=True):
        assert_bits_equal(x, want, "what was left")
    assert_equal([*changed.pairs(left, changed.here())], [], "what differs")
