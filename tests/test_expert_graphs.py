"""Captured expert layers: replays with other choices, masks and overflows give eager's bits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from commlib import graph, ops
from commlib.errors import CapacityError
from tests.support.checks import assert_bits_equal, assert_equal, on_gpu, raises, sample, settle
from tests.support.experts import differing_bytes
from tests.support.operator import calls, compile_whole
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

TOKENS, TOP_K, WIDTH, EXPERTS, CAPACITY = 6, 2, 16, 5, 4


class Layer:
    """A gate's weights and this rank's experts, which multiply by a matrix each."""

    def __init__(self, comm: Any, **how: Any) -> None:
        local = -(-EXPERTS // comm.size)
        self.comm, self.how = comm, {"on_overflow": "drop", **how}
        self.experts = sample(comm.rank, (local, WIDTH, WIDTH), torch.float32).to(comm.device)
        self.experts.requires_grad_()

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, active: Any = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the result, the counts and the demand."""
        sent = ops.expert_dispatch(
            x, ids, EXPERTS, CAPACITY, weights=weights, active=active, **self.how
        )
        out = ops.expert_combine(torch.bmm(sent.rows, self.experts), sent.handle)
        return out, sent.counts.clone(), sent.handle.demand.clone()

    def step(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the result and all gradients."""
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        out, *_ = self(x, ids, weights)
        return out.detach(), *torch.autograd.grad(out.square().sum(), (x, weights, self.experts))


def batch(comm: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return this rank's tokens, choices and weights; at times all choose one expert or none."""
    x = sample(comm.rank, (TOKENS, WIDTH), torch.float32, seed)
    ids = torch.randint(-1, EXPERTS, (TOKENS, TOP_K), generator=torch.Generator().manual_seed(seed))
    if comm.rank == 1 and seed % 3 == 0:
        ids.fill_(-1)
    elif seed % 5 == 4:
        ids.fill_(seed % EXPERTS)
    weights = sample(comm.rank, (TOKENS, TOP_K), torch.float32, seed + 1)
    return x.to(comm.device), (ids + comm.rank).to(comm.device), weights.to(comm.device)


def compare(found: Any, expected: Any, what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        assert_bits_equal(one, other, what)


def check_replays(captured: Any, *replays: int) -> None:
    """Check that there is one captured call per number, replayed so often, and no eager call."""
    rows = graph.report(captured)
    assert_equal([row["eager"] for row in rows], [None] * len(replays), "captured, not eager")
    assert_equal(sorted(row["replays"] for row in rows), sorted(replays), "replays")


@runs_on("ranks", deadline=120)
def test_a_captured_layer(comm: Any) -> None:
    layer = Layer(comm)
    captured = graph.capture(layer.__call__, outputs="copy")
    with torch.no_grad():
        for seed in range(12):
            inputs = batch(comm, seed)
            compare(captured(*inputs), layer(*inputs), f"replay {seed}")
    check_replays(captured, 11)  # the first call captures


@runs_on("ranks", deadline=120)
def test_a_captured_step(comm: Any) -> None:
    """Forward and backward in one graph."""
    layer = Layer(comm)
    captured = graph.capture(layer.step, outputs="copy")
    for seed in range(12):
        inputs = batch(comm, seed)
        compare(captured(*inputs), layer.step(*inputs), f"replay {seed}")
    check_replays(captured, 11)


@runs_on("ranks", deadline=120)
def test_a_captured_forward_with_its_backward(comm: Any) -> None:
    """A graph each, joined by autograd."""
    layer = Layer(comm)

    def result(*given: torch.Tensor) -> torch.Tensor:
        return layer(*given)[0]

    captured = graph.capture(result)
    for seed in range(6):
        x, ids, weights = batch(comm, seed)
        results = []
        for call in (captured, result):
            leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
            out = call(leaves[0], ids, leaves[1])
            grads = torch.autograd.grad(out.square().sum(), (*leaves, layer.experts))
            results.append([grad.clone() for grad in grads])
        compare(*results, f"gradients {seed}")
    check_replays(captured, 5)


@runs_on("all_gpu_ranks", deadline=300)
def test_many_replays(comm: Any) -> None:
    """Five exchanges each, all compared; test_expert_channel_graphs replays the forward more often.

    Inputs and results of eager steps are on the device before, so no replay waits for the host.
    """
    layer, batches = Layer(comm), [batch(comm, seed) for seed in range(20)]
    expected = [layer.step(*inputs) for inputs in batches]
    inputs = batch(comm, 0)
    recorded, before = torch.cuda.CUDAGraph(), calls(comm)
    with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
        out = layer.step(*inputs)
    launched, replays = calls(comm), 200
    wrong = torch.zeros(replays, dtype=torch.int64, device=comm.device)
    for turn in range(replays):
        seed = turn * 7 % len(batches)
        for static, fresh in zip(inputs, batches[seed], strict=True):
            static.copy_(fresh)
        recorded.replay()
        wrong[turn] = differing_bytes(out, expected[seed])
    settle(comm)
    comm.check()
    assert_equal(wrong.nonzero().flatten().tolist(), [], "replays with another result")
    assert_equal(launched > before, True, "the exchanges are in the graph")
    assert_equal(calls(comm), launched, "no replay launches a call of the host")
    assert_equal(len({one[0].sum().item() for one in expected}) > 10, True, "they are different")


def masks(comm: Any) -> None:
    """The mask is read at each replay: ranks leave and return without another capture."""
    layer = Layer(comm)
    captured = graph.capture(layer.__call__, outputs="copy")
    with torch.no_grad():
        for seed in range(9):
            active = torch.ones(comm.size, dtype=torch.uint8, device=comm.device)
            active[seed % comm.size] = seed % 2
            inputs = *batch(comm, seed), active
            actual, expected = captured(*inputs), layer(*inputs)
            compare(actual, expected, f"replay {seed}")
            if not active[comm.rank]:
                assert_equal(float(actual[0].abs().sum()), 0.0, f"result {seed}")
    check_replays(captured, 8)


def test_masks(ranks: Ranks) -> None:
    ranks(masks)


def test_masks_of_many_ranks(many_ranks: Ranks) -> None:
    many_ranks(masks)


def in_8_bits(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, active: Any) -> Any:
    """Return the rows and their scales, and the sums of what these stand for."""
    sent = ops.expert_dispatch(
        x, ids, EXPERTS, CAPACITY, weights=weights, on_overflow="drop", quantize="fp8"
    )
    assert sent.scales is not None
    rows = sent.rows.float().unflatten(2, (-1, 128)) * sent.scales[..., None]
    return sent.rows.clone(), sent.scales.clone(), ops.expert_combine(rows.flatten(2), sent.handle)


def with_mask(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, active: Any) -> Any:
    sent = ops.expert_dispatch(
        x, ids, EXPERTS, CAPACITY, weights=weights, on_overflow="drop", active=active
    )
    return ops.expert_combine(sent.rows * 2, sent.handle), sent.counts.clone()


def transformed(comm: Any, call: Callable[..., Any], mode: str) -> None:
    """Compiled and captured calls have eager's bits, with other choices and masks each time."""
    make = compile_whole if mode == "compiled" else partial(graph.capture, outputs="copy")
    fast = make(call)
    for seed in range(6):
        x = sample(comm.rank, (TOKENS, 256), torch.float32, seed).to(comm.device)
        x[seed % TOKENS, :128] = 0  # a scale without a magnitude
        active = torch.ones(comm.size, dtype=torch.uint8, device=comm.device)
        active[seed % comm.size] = seed % 2
        arguments = x, *batch(comm, seed)[1:], active
        compare(fast(*arguments), call(*arguments), f"{mode} {seed}")
    if mode == "captured":
        check_replays(fast, 5)


@pytest.mark.parametrize("mode", ["compiled", "captured"])
@pytest.mark.parametrize("call", [in_8_bits, with_mask])
def test_options_of_a_dispatch(ranks: Ranks, call: Callable[..., Any], mode: str) -> None:
    ranks(transformed, call, mode, deadline=120)


@runs_on("ranks")
def test_overflow_in_a_replay(comm: Any) -> None:
    """An error on every rank at the next check; the graph and the ring stay usable."""
    layer = Layer(comm, on_overflow="error")
    captured = graph.capture(layer.__call__, outputs="copy")
    x, _, weights = batch(comm, 1)
    few = torch.full((TOKENS, TOP_K), -1, device=comm.device)
    few[0, 0] = 3
    many = torch.full((TOKENS, TOP_K), 3, device=comm.device)
    words = f"expert 3 of rank {3 // -(-EXPERTS // comm.size)} got", f"capacity={CAPACITY}"
    with torch.no_grad():
        for number in range(5):
            compare(captured(x, few, weights), layer(x, few, weights), f"replay {number}")
        with raises(CapacityError, *words):
            captured(x, many, weights)
            settle(comm)
            comm.check()
        comm.check()
        compare(captured(x, few, weights), layer(x, few, weights), "afterwards")
    check_replays(captured, 6)
    settle(comm)
    comm.check()
    assert_equal(on_gpu(comm) or comm.report()["state"] == "ready", True, "state")
