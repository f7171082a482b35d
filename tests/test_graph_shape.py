"""What a captured function is made of, and its results while the host runs ahead of the GPU."""

from typing import Any

import torch

from commlib import graph, ops
from tests.support.checks import assert_equal
from tests.support.graph_nodes import parts
from tests.support.runs_on import runs_on

TURNS = 100  # replays that nobody waits for: an order that is missing between two would show


@runs_on("unified_ranks")
def test_a_graph_holds_the_operators_alone(comm: Any) -> None:
    """A graph that writes in place has the function's operators and nothing else."""
    total = torch.zeros(1 << 10, device=comm.device)

    def f(x: torch.Tensor) -> None:
        total.add_(x).mul_(2).clamp_(max=100)

    g = graph.capture(f)
    for _ in range(3):
        g(torch.ones(1 << 10, device=comm.device))
    (nodes,) = parts(g)
    assert_equal(len(nodes), 3, nodes)
    assert_equal([name for name in nodes if name.startswith("mem")], [], nodes)


@runs_on("unified_ranks")
def test_one_copy_an_output(comm: Any) -> None:
    """What a function makes and returns is copied once, out of the memory that graphs share."""
    g = graph.capture(lambda x: (x * 3, x - 1))
    for _ in range(3):
        g(torch.ones(1 << 10, device=comm.device))
    (nodes,) = parts(g)
    copies = [name for name in nodes if name == "memcpy" or "copy_" in name]
    assert_equal((len(nodes), len(copies)), (4, 2), nodes)


@runs_on("gpu_ranks")
def test_one_kernel_a_reduction(comm: Any) -> None:
    """Push kernels reduce the program's memory in place, without a copy before or after."""
    x = torch.ones(1 << 12, dtype=torch.bfloat16, device=comm.device)
    g = graph.capture(lambda: ops.all_reduce(x, out=x))
    for _ in range(3):
        g()
    (nodes,) = parts(g)
    assert_equal(len(nodes), 1, nodes)
    assert_equal([name for name in nodes if name.startswith("mem")], [], nodes)


@runs_on("unified_ranks")
def test_a_backward_copies_nothing(comm: Any) -> None:
    """A backward is a separate graph, which copies nothing."""
    weight = torch.ones(8, 8, device=comm.device, requires_grad=True)
    g = graph.capture(lambda x: (x @ weight).relu().sum())
    for _ in range(4):
        g(torch.ones(4, 8, device=comm.device)).backward()
    forward, backward = parts(g)
    assert_equal(
        [name for name in backward if name.startswith("mem") or "copy_" in name], [], backward
    )
    assert_equal(bool(forward), True, "the forward's graph")


@runs_on("unified_ranks")
def test_replays_that_the_host_runs_ahead_of(comm: Any) -> None:
    """Replays whose results the device compares: the host never waits, and reads once at the end.

    A host that waits for each result would hide an order between streams that is missing.
    """
    size = 1 << 16
    state = torch.zeros(size, device=comm.device)
    want = torch.zeros(size, device=comm.device)
    wrong = torch.zeros((), dtype=torch.bool, device=comm.device)

    def f(x: torch.Tensor) -> torch.Tensor:
        state.mul_(0.5).add_(ops.all_reduce(x))
        return state * 2

    g = graph.capture(f, verify=False, outputs="copy")
    g(torch.zeros(size, device=comm.device))
    stream = torch.cuda.Stream() if comm.device.type == "cuda" else None
    for turn in range(TURNS):
        x = torch.full((size,), float(turn % 7), device=comm.device)
        if stream is not None and turn % 2:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                out = g(x)
            torch.cuda.current_stream().wait_stream(stream)
        else:
            out = g(x)
        want.mul_(0.5).add_(x * comm.size)
        wrong |= (out != want * 2).any()
    assert_equal(bool(wrong), False, "a replay that differs")
