"""Hazards of graphs: one test per row of docs/graph_hazards.md that test_graph.py lacks.

Most rows show on a CPU, whose engine has a graph's stale addresses and baked branches. What only
streams, allocators and drivers do is asked where the ranks have GPUs.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import commlib
from commlib import flags, graph, ops
from commlib.graph import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises, settle
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on


def ring_of(comm: Any, ring_id: int, **more: Any) -> Any:
    """Return a fresh ring of the same ranks; it is closed after the test."""
    return commlib.new_ring(ring_id, range(comm.size), **more)


# -- S: silent wrong numbers -----------------------------------------------------------------------


@runs_on("unified_ranks")
def test_outputs_that_outlive_the_graph(comm: Any) -> None:
    """An output that is held longer than its graph is right, or raises (S2, S4)."""
    x = torch.ones(1000, device=comm.device)
    held = graph.capture(lambda x: x + 1)(x)
    gc.collect()
    junk = [torch.full((1000,), 7.0, device=comm.device) for _ in range(50)]
    try:
        actual = held.clone()
    except RuntimeError as error:
        assert_equal("graph" in str(error), True, str(error))
    else:
        assert_bits_equal(actual, x + 1, "after the end of its graph")
    del junk


@runs_on("unified_ranks")
def test_gradients_are_not_aliased(comm: Any) -> None:
    """Two backwards give their own gradients, to be added up by the program (S5)."""
    weight = torch.linspace(-1, 1, 6, device=comm.device, requires_grad=True)
    plain = [torch.linspace(turn, 2, 6, device=comm.device) for turn in range(4)]

    def both(call: Any) -> list[torch.Tensor]:
        total = [torch.zeros(6, device=comm.device) for _ in range(2)]
        saved: list[torch.Tensor] = []
        for value in plain:
            x = value.clone().requires_grad_()
            grads = torch.autograd.grad(call(x).sum(), [x, weight])
            saved += grads
            if len(saved) == 2:
                total = list(grads)  # the first pair itself becomes the sum, as .grad does
            else:
                for one, more in zip(total, grads, strict=True):
                    one.add_(more)
        return [*total, *saved[2:]]

    f = graph.capture(lambda x: torch.sin(x * weight) * x)
    for turn, (one, want) in enumerate(zip(both(f), both(f.fn), strict=True)):
        assert_bits_equal(one, want, f"tensor {turn}")
    assert_equal(len(next(iter(f.entries.values())).parts), 1, "slots")


@runs_on("unified_ranks")
def test_plain_values_are_keys(comm: Any) -> None:
    """A flag, an int and a float are distinguished, also where they compare equal (S6, S7)."""

    def f(x: torch.Tensor, value: Any) -> torch.Tensor:
        if value is True:
            return -x
        if isinstance(value, float):
            return x / value
        return x + value if isinstance(value, int) else x.clone()

    g = graph.capture(f, outputs="copy")
    values = [True, 1, 1.0, 0, False, 2.0, None, "label"]
    for turn in range(3):
        x = torch.full((3,), turn + 1.0, device=comm.device)
        for value in values:
            assert_bits_equal(g(x, value), f(x, value), f"{value!r}, turn {turn}")
    assert_equal(len(g.entries), len(values), "kinds of calls")


@runs_on("unified_ranks")
def test_signed_zeros_are_keys(comm: Any) -> None:
    """0.0 and -0.0 compare equal and divide differently (S7)."""
    g = graph.capture(lambda x, by: x / by, outputs="copy")
    x = torch.ones(2, device=comm.device)
    for by in (0.0, -0.0, 0.0):
        assert_bits_equal(g(x, by), x / by, f"by {by}")


@runs_on("unified_ranks")
def test_modes_are_keys(comm: Any) -> None:
    """Grad mode, autocast, its dtype, and ``key=`` for what the arguments do not show (S6)."""
    weight = torch.linspace(-1, 1, 16, device=comm.device).view(4, 4)
    doubled = [False]

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        y = y + 1 if torch.is_grad_enabled() else y
        return y * 2 if doubled[0] else y

    g = graph.capture(f, outputs="copy", key=lambda x: doubled[0])
    x = torch.linspace(0, 1, 8, device=comm.device).view(2, 4)
    for turn in range(2):
        for doubled[0] in (False, True):
            assert_bits_equal(g(x), f(x), f"plain, turn {turn}")
            with torch.no_grad():
                assert_bits_equal(g(x), f(x), f"no_grad, turn {turn}")
            for dtype in (torch.bfloat16, torch.float16):
                with torch.autocast(comm.device.type, dtype):
                    result = g(x)
                    assert_equal(result.dtype, dtype, "of autocast")
                    assert_bits_equal(result, f(x), f"autocast to {dtype}, turn {turn}")
    assert_equal(len(g.entries), 8, "kinds of calls")


@runs_on("unified_ranks")
def test_autocast_around_a_capture(comm: Any) -> None:
    """Autocast keeps its copies of weights to itself: a replay reads the weights of now (S6)."""
    torch.manual_seed(4)
    module = torch.nn.Linear(4, 4).to(comm.device)
    g = graph.capture(module, outputs="copy")
    x = torch.linspace(0, 1, 8, device=comm.device).view(2, 4)
    for turn in range(3):
        with torch.autocast(comm.device.type, torch.bfloat16):
            result = g(x)
        with torch.autocast(comm.device.type, torch.bfloat16):
            assert_bits_equal(result, module(x), f"turn {turn}")
        with torch.no_grad():
            module.weight.mul_(2)


@runs_on("unified_ranks")
def test_training_flag_of_a_part(comm: Any) -> None:
    """The training flag of a part of the module counts as that of the whole does (S6)."""
    module = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(1.0)).to(comm.device)
    g = graph.capture(module, outputs="copy")
    x = torch.ones(8, device=comm.device)
    assert_bits_equal(g(x), torch.zeros(8), "drops all")
    module[1].eval()
    assert_bits_equal(g(x), torch.ones(8), "drops nothing")
    module[1].train()
    assert_bits_equal(g(x), torch.zeros(8), "drops all again")


@runs_on("unified_ranks")
def test_ranks_with_different_keys(comm: Any) -> None:
    """Ranks whose calls have other keys: well with the same collectives, else refused (S11)."""
    g = graph.capture(lambda x, scale: ops.all_reduce(x * scale), outputs="copy")
    for turn in range(3):
        x = torch.full((3,), turn + 1.0, device=comm.device)
        assert_bits_equal(g(x, comm.rank + 1), x * 3, f"turn {turn}")  # 1 + 2
    with flags.override("FLAGS_comm_check", 0):  # else the calls themselves are compared on CPUs
        ring = ring_of(comm, 90)

    @graph.capture
    def other(x: torch.Tensor, op: str) -> Any:
        y = comm.all_reduce(torch.zeros_like(x), x)
        return ring.all_reduce(torch.zeros_like(y), y, op=op)

    x = torch.ones(3, device=comm.device)
    mine, theirs = ("max", "sum") if comm.rank else ("sum", "max")
    with raises(GraphError, "ring 90", "number 0", "rank 0", "rank 1", "test_graph_hazards.py"):
        other(x, mine)
    assert_equal(len(other.entries), 0, "graphs")
    settle(comm)
    with raises(GraphError, "different collectives"):
        other(x, theirs)
    assert_bits_equal(other(x, "max"), torch.full((3,), 2.0), "the next capture")
    settle(comm)


@pytest.mark.parametrize("size", [5, 30_000, 400_000])
@runs_on("unified_ranks")
def test_reset_between_replays(comm: Any, size: int) -> None:
    """ring.reset() between replays resets the ring's channels; its graphs stay right (S12)."""
    ring = ring_of(comm, 90)
    g = graph.capture(lambda x: ring.all_reduce(torch.zeros_like(x), x), outputs="copy")
    for turn in range(6):
        x = torch.full((size,), turn + comm.rank + 1.0, device=comm.device)
        assert_bits_equal(g(x), torch.full((size,), 2 * turn + 3.0), f"turn {turn}")
        if turn % 2:
            ring.reset()
    ring.check()


@runs_on("unified_ranks")
def test_outputs_from_outside(comm: Any) -> None:
    """What the graph has not made is returned as it is, and no replay ends its life (S13)."""
    table = torch.arange(6.0, device=comm.device)

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [table, table[2:4], x[1:], x + table[:3]]

    g = graph.capture(f)
    x = torch.ones(3, device=comm.device)
    whole_table, part, view, _ = g(x)
    assert_equal(whole_table is table, True, "the table itself")
    for turn in range(3):
        table.add_(1)
        g(torch.full((3,), float(turn), device=comm.device))
        assert_bits_equal(whole_table, torch.arange(6.0) + turn + 1, "still to be read")
        assert_bits_equal(part, torch.arange(2.0, 4.0) + turn + 1, "a view of it")
        assert_bits_equal(view, torch.ones(2), "a view of the caller's own")
    g.reset()
    gc.collect()
    assert_bits_equal(part, torch.arange(2.0, 4.0) + 3, "after the graph")


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, capturable=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, capturable=True, foreach=True),
}


def optimizers(comm: Any, kind: str, how: str) -> None:
    """State that an optimizer makes at its first step counts once, or the capture says why (S14).

    ``how``: "lazy" captures the first step, which is refused where it makes state; "kept" lets the
    run before the capture be the first step; "stepped" takes an eager step before.
    """
    start = [torch.linspace(-1, i + 1, 4, device=comm.device) for i in range(3)]

    def train(captured: bool) -> list[torch.Tensor]:
        weights = [x.clone().requires_grad_() for x in start]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer = OPTIMIZERS[kind](weights)

        def step() -> None:
            for weight in weights:
                assert weight.grad is not None
                weight.grad.copy_(torch.cos(weight.detach()))
            optimizer.step()

        steps = 5
        if how == "stepped":
            step()
            steps -= 1
        call: Callable[[], object] = step
        if captured:
            more: Any = {"first": "warmup", "warmup": 1} if how == "kept" else {}
            call = graph.capture(step, **more)
        for _ in range(steps):
            call()
        return [weight.detach() for weight in weights]

    plain = train(captured=False)
    for i, actual in enumerate(train(captured=True)):
        assert_bits_equal(actual, plain[i], f"weight {i}")


@pytest.mark.parametrize("how", ["lazy", "kept", "stepped"])
@pytest.mark.parametrize("kind", ["sgd", "momentum"])
def test_optimizers(unified_ranks: Ranks, kind: str, how: str) -> None:
    unified_ranks(optimizers, kind, how)


@pytest.mark.parametrize("how", ["lazy", "kept", "stepped"])
@pytest.mark.parametrize("kind", ["rmsprop", "adam"])
def test_optimizers_that_count(gpu_ranks: Ranks, kind: str, how: str) -> None:
    """On a CPU torch reads their step counters on the host."""
    gpu_ranks(optimizers, kind, how)


NOTHING: dict[str, Callable[[torch.Tensor], Any]] = {
    "no work": lambda x: None,
    "the argument": lambda x: x,
    "a view": lambda x: x.view(2, 2),
    "memory": lambda x: torch.empty_like(x).shape,
}


@pytest.mark.parametrize("what", NOTHING)
@runs_on("unified_ranks")
def test_functions_without_kernels(comm: Any, what: str) -> None:
    """A function without any kernel is not a failed capture (S15)."""
    f = NOTHING[what]
    g = graph.capture(f)
    for turn in range(3):
        x = torch.full((4,), float(turn), device=comm.device)
        actual, want = g(x), f(x)
        if isinstance(want, torch.Tensor):
            assert_bits_equal(actual, want, f"turn {turn}")
        else:
            assert_equal(actual, want, f"turn {turn}")


@runs_on("unified_ranks")
def test_unfenced_collectives(comm: Any) -> None:
    """A raw collective on the comm stream is part of the graph all the same (S16)."""
    out = torch.zeros(4, device=comm.device)

    @graph.capture
    def f(x: torch.Tensor) -> None:
        comm.all_reduce(out, x, use_calc_stream=False, fenced=False)

    for turn in range(4):
        x = torch.full((4,), turn + 1.0, device=comm.device)
        settle(comm)  # an eager call reads it on the comm stream, and nothing orders that
        f(x)
        settle(comm)
        assert_bits_equal(out, torch.full((4,), 2 * (turn + 1.0)), f"turn {turn}")
    assert_equal([len(row["collectives"]) for row in graph.report(f)], [1])
