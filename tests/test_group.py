"""ring.group(): the calls of a ``with`` block, launched as one operation at its end."""

import random
import threading
from collections.abc import Callable
from typing import Any

import torch

import commlib
from commlib import ops
from commlib.compat import paddle
from commlib.core.memory import Uses
from commlib.errors import ArgumentError, RingError
from tests.support.checks import (
    Framed,
    assert_bits_equal,
    assert_equal,
    raises,
    sample,
    settle,
    until,
    wide,
)
from tests.support.formulas import joined, total
from tests.support.operator import calls
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

BOTH: tuple[dict[str, bool], ...] = (
    {},
    {"use_calc_stream": False},
    {"use_calc_stream": False, "sync_op": False},
)
LARGE = 1_000_003


def crossing(comm: Any) -> None:
    """Everybody sends to everybody first and receives then: one by one that could never end."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    mine = sample(comm.rank, (LARGE,), torch.float32).to(comm.device)
    for mode in BOTH:
        outs = {rank: torch.zeros_like(mine) for rank in others}
        with comm.group(**mode) as work:
            for rank in others:
                comm.send(mine, peer=rank, use_calc_stream=not mode)
            for rank, out in outs.items():
                comm.recv(out, peer=rank, use_calc_stream=not mode)
        work.wait()
        for rank, out in outs.items():
            assert_bits_equal(out, sample(rank, (LARGE,), torch.float32), f"from {rank}, {mode}")


def test_crossing_sends(ranks: Ranks) -> None:
    ranks(crossing)


def test_crossing_sends_of_three(three_ranks: Ranks) -> None:
    three_ranks(crossing)


@runs_on("ranks")
def test_collectives(comm: Any) -> None:
    """Collectives of several kinds, one with a strided output; the Work holds all results."""
    every = [sample(rank, (3, 4), torch.float64) for rank in range(2)]
    x, arrays = every[comm.rank].to(comm.device), [wide(x) for x in every]
    for mode in BOTH:
        frame = Framed((6, 4), torch.float64, comm.device, "stepped")
        summed, cast = torch.zeros_like(x), torch.zeros_like(x)
        before = calls(comm)
        with comm.group(**mode) as work:
            kwargs = {"use_calc_stream": not mode}
            assert_equal(
                comm.all_reduce(summed, x, **kwargs) is summed, True, "result inside the group"
            )
            comm.all_gather(frame.view, x, **kwargs)
            comm.broadcast(cast, x, root=1, **kwargs)
            assert_equal(calls(comm), before, "calls launched inside the block")
        assert_equal(calls(comm) - before, 3, "calls of the group")
        assert_equal(
            [id(r) for r in work.wait()], [id(summed), id(frame.view), id(cast)], "results"
        )
        assert_bits_equal(summed, total(arrays, 0), "all_reduce")
        assert_bits_equal(frame.view, joined(arrays, 0), "all_gather")
        assert_bits_equal(cast, every[1], "broadcast")
        frame.intact()
        until(work.done, "done() after wait()")


@runs_on("ranks")
def test_several_roots(comm: Any) -> None:
    """Calls of one size to and from each rank in turn."""
    for _ in range(3):
        inputs = [
            sample(comm.rank, (3, 4), torch.float32, seed).to(comm.device) for seed in range(6)
        ]
        sums, copies = [x.clone() for x in inputs], [x.clone() for x in inputs]
        with comm.group():
            for seed, x in enumerate(sums):
                comm.reduce(x, x, root=seed % comm.size)
        with comm.group():
            for seed, x in enumerate(copies):
                comm.broadcast(x, x, root=seed % comm.size)
        for seed in range(6):
            root = seed % comm.size
            every = [sample(rank, (3, 4), torch.float32, seed) for rank in range(comm.size)]
            assert_bits_equal(copies[seed], every[root], f"from {root}, {seed}")
            if comm.rank == root:
                assert_bits_equal(sums[seed], every[0] + every[1], f"to {root}, {seed}")


@runs_on("ranks")
def test_nothing_launched(comm: Any) -> None:
    """An exception in the block, a wrong call in it and an empty block launch nothing."""
    x = torch.ones(4, device=comm.device)
    before = calls(comm)
    with raises(ZeroDivisionError), comm.group():
        comm.all_reduce(torch.zeros_like(x), x)
        _ = 1 / 0
    with raises(ArgumentError, "open already"), comm.group(), comm.group():
        pass
    with raises(ArgumentError, "use_calc_stream=False"), comm.group(sync_op=False):
        pass
    with comm.group() as work:
        assert_equal(work.done(), False, "done() inside the group")
        with raises(ArgumentError, "leave"):
            work.wait()
        with raises(ArgumentError, "ring.group(use_calc_stream=False)"):
            comm.all_reduce(torch.zeros_like(x), x, use_calc_stream=False)
        with raises(ArgumentError, "inside a group"):
            comm.all_reduce(torch.zeros_like(x), x, use_calc_stream=False, sync_op=False)
    assert_equal((work.wait(), work.done()), ([], True), "an empty group")
    assert_equal(calls(comm), before, "calls launched")
    out = torch.zeros_like(x)
    assert_bits_equal(comm.all_reduce(out, x), torch.full((4,), 2.0), "after it all")


@runs_on("ranks")
def test_left_by_an_exception(comm: Any) -> None:
    """The Work of a group that was never launched says so."""
    x, before = torch.ones(3, device=comm.device), calls(comm)
    with raises(ZeroDivisionError), comm.group(use_calc_stream=False, sync_op=False) as work:
        comm.all_reduce(x, x, use_calc_stream=False)
        raise ZeroDivisionError
    with raises(ArgumentError, "an exception left the group"):
        work.wait()
    assert_equal((work.done(), calls(comm)), (False, before), "done, calls")


@runs_on("ranks")
def test_shared_memory(comm: Any) -> None:
    """Calls of a group that would race are refused on this rank; the ring goes on."""
    y, table, peer = torch.ones(8, device=comm.device), torch.ones(4, 4), 1 - comm.rank
    table, before = table.to(comm.device), calls(comm)
    racing: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "out shares memory with out of call 1 (all_reduce)": (
            lambda: comm.all_reduce(y, y),
            lambda: comm.all_reduce(y, y),
        ),
        "out shares memory with out of call 1": (
            lambda: comm.all_reduce(y[:5], y[:5]),
            lambda: comm.all_gather(y[4:], torch.ones(2, device=comm.device)),
        ),
        "x shares memory with out of call 1 (broadcast)": (
            lambda: comm.broadcast(y, torch.zeros_like(y), root=1),
            lambda: comm.all_gather(y),
        ),
        "out shares memory with x of call 1 (send)": (
            lambda: comm.send(y, peer=peer),
            lambda: comm.recv(y, peer=peer),
        ),
        "x shares memory with out of call 1 (all_reduce)": (
            lambda: comm.all_reduce(table[1], table[1]),
            lambda: comm.all_reduce(table[:, 2]),
        ),
    }
    for text, (first, second) in racing.items():
        with raises(ArgumentError, f"on ring 0 (rank {comm.rank}", text), comm.group():
            first()
            second()
    assert_equal(calls(comm), before, "calls launched")
    sums: list[torch.Tensor] = []
    with comm.group():  # columns, a row between them, one input twice, and empty tensors
        for column in (table[1:, :2], table[1:, 2], table[0, 2:]):
            comm.all_reduce(column, column)
        sums += [comm.all_reduce(y), comm.all_reduce(y)]
        comm.all_reduce(y[:0], y[:0])
    assert_bits_equal(table, [[1.0, 1.0, 2.0, 2.0], *[[2.0, 2.0, 2.0, 1.0]] * 3], "table")
    assert_bits_equal(torch.stack(sums), torch.full((2, 8), 2.0), "sums")


def test_ranges_of_memory() -> None:
    """Uses that meet are found whatever was added between and around them."""
    buffer, generator = torch.zeros(60), random.Random(3)
    for _ in range(200):
        uses, taken = Uses(), [0] * 60  # 1: read, 2: written
        for _ in range(12):
            begin, writes = generator.randrange(60), generator.random() < 0.5
            end = min(60, begin + generator.randrange(1, 20))
            strided = slice(begin, end, generator.randrange(1, 4))
            x, before = buffer[strided], taken[strided]
            clashes = any(before) if writes else 2 in before
            assert_equal(uses.clash(x, writes=writes) is not None, clashes, f"{strided}")
            uses.add(x, writes=writes)
            taken[strided] = [max(old, 1 + writes) for old in before]


def in_a_thread(comm: Any, body: Callable[[], Any]) -> Any:
    """Return what ``body`` returns in its own thread, at most after 50 s.

    The first call on a ring of GPUs connects it, which may take as long as its timeout.
    """
    outcome: list[Any] = []

    def run() -> None:
        if comm.device.type == "cuda":
            torch.cuda.set_device(comm.device)
        try:
            outcome.append(body())
            settle(comm)
        except Exception as error:  # a thread's error would be lost
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(50)
    if len(outcome) != 1 or isinstance(outcome[0], Exception):
        raise AssertionError(f"the thread gave {outcome}, still alive: {thread.is_alive()}")
    return outcome[0]


def _grouped(comm: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    with comm.group():
        comm.all_reduce(out, x * 2)
    return out


@runs_on("ranks")
def test_other_threads(comm: Any) -> None:
    """Calls of another thread, on the same ring and on another one, do not wait for the block."""
    other = commlib.new_ring(31, [0, 1])
    assert other is not None
    x = torch.full((4,), comm.rank + 1.0, device=comm.device)
    before, twice = calls(comm), torch.zeros_like(x)
    with comm.group():
        comm.all_reduce(twice, x * 2)
        assert_bits_equal(
            in_a_thread(comm, lambda: ops.all_reduce(x, 31)), [3.0] * 4, "another ring"
        )
        assert_bits_equal(in_a_thread(comm, lambda: ops.all_reduce(x)), [3.0] * 4, "the same ring")
        assert_equal(calls(comm) - before, 1, "calls on the ring inside the block")
        assert_equal(
            in_a_thread(comm, lambda: _grouped(comm, x)).tolist(), [6.0] * 4, "its own group"
        )
    assert_equal(calls(comm) - before, 3, "calls on the ring")
    assert_bits_equal(twice, [6.0] * 4, "the group")


@runs_on("ranks")
def test_composites(comm: Any) -> None:
    """What computes with a collective's result says so inside a group; nothing is launched."""
    x = torch.ones(2, 3, device=comm.device)
    wants_grad = x.clone().requires_grad_()
    logits = torch.linspace(-0.9, 0.9, 8, device=comm.device).view(2, 4)
    label = torch.tensor([1, 5], device=comm.device)
    count = torch.ones(2, dtype=torch.int64)
    row = torch.ones(3, device=comm.device)
    wrong: dict[str, Callable[[], Any]] = {
        "concat": lambda: ops.concat(x),
        "softmax_with_cross_entropy": lambda: ops.softmax_with_cross_entropy(logits, label),
        "margin_cross_entropy": lambda: ops.margin_cross_entropy(logits, label),
        "all_reduce_residual_norm": lambda: ops.all_reduce_residual_norm(x, x, row),
        "all_reduce": lambda: ops.all_reduce(wants_grad),
        "all_gather": lambda: ops.all_gather(wants_grad),
        "reduce_scatter": lambda: ops.reduce_scatter(wants_grad, op="avg"),
        "global_scatter": lambda: ops.global_scatter(wants_grad, count, count),
        "global_gather": lambda: ops.global_gather(wants_grad, count, count),
        "barrier": lambda: paddle.barrier(x),
    }
    before = calls(comm)
    for name, call in wrong.items():
        with comm.group(), raises(ArgumentError, f"{name} on ring 0", "outside the group"):
            call()
    with comm.group(), raises(ArgumentError, "concat on ring 0"):
        paddle.c_concat(x, comm.rank, comm.size)
    assert_equal(calls(comm), before, "calls launched by refused ones")
    with comm.group():
        plain = ops.all_reduce(wants_grad.detach())
    assert_bits_equal(plain, torch.full((2, 3), 2.0), "the remedy")


def backwards(comm: Any) -> None:
    """A backward inside a group launches its collectives at once and has the right gradients."""
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "all_reduce": ops.all_reduce,
        "reduce_scatter": lambda x: ops.reduce_scatter(x, op="avg"),
        "split": ops.split,
        "identity": ops.identity,
    }
    weight = torch.arange(1.0, 9.0, device=comm.device).view(2, 4)
    for name, form in forms.items():
        x = torch.ones(2, 4, device=comm.device, requires_grad=True)
        y = form(x)
        loss = (y * weight.flatten()[: y.numel()].view(y.shape) * (comm.rank + 1)).sum()
        (want,) = torch.autograd.grad(loss, x, retain_graph=True)
        summed, before = torch.zeros(3, device=comm.device), calls(comm)
        with comm.group():
            comm.all_reduce(summed, torch.ones_like(summed))
            (grad,) = torch.autograd.grad(loss, x)
            assert_equal(calls(comm) - before, 1, f"calls inside the block, {name}")
            assert_bits_equal(grad, want, f"gradient inside the block, {name}")
        assert_bits_equal(summed, [2.0] * 3, f"the group around the backward of {name}")


class _GroupInBackward(torch.autograd.Function):
    """A program's own backward that opens a group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        ring, out = commlib.comm(), torch.zeros_like(grads[0])
        before = calls(ring)
        with ring.group():
            ring.all_reduce(out, grads[0].contiguous())
            assert_equal(calls(ring), before, "calls inside the group of a backward")
        return out


def group_in_backward(comm: Any) -> None:
    """A group that a backward opens collects its own calls, also inside another group."""
    x = torch.ones(3, device=comm.device, requires_grad=True)
    y, out = _GroupInBackward.apply(x), torch.zeros(3, device=comm.device)  # type: ignore[no-untyped-call]
    with comm.group():
        comm.all_reduce(out, x.detach())
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert_bits_equal(grad, [2.0] * 3, "gradient inside the block")
    assert_bits_equal(out, [2.0] * 3, "the outer group")


def test_backwards(ranks: Ranks) -> None:
    ranks(backwards)
    ranks(group_in_backward)


@runs_on("ranks")
def test_failed_launch(comm: Any) -> None:
    """The Work of a group whose launch failed raises what the block has raised."""
    ring = commlib.new_ring(32, [0, 1])
    assert ring is not None
    x = torch.ones(3, device=comm.device)
    with raises(RingError, "group on ring 32", "aborted"), ring.group() as work:
        ring.all_reduce(torch.zeros_like(x), x)
        ring.abort()
    for _ in range(2):
        with raises(RingError, "group on ring 32", "aborted"):
            work.wait()
    assert_equal(work.done(), False, "done()")
