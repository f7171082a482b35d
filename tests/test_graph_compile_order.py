"""A module that branches on "am I captured", compiled before, in and after captures.

A tracer that runs before the capture fixes the branch that the program takes outside captures. Its
code must give the right numbers from graphs too, below and above every size at which another kernel
carries the reduction.
"""

import json
from collections.abc import Callable
from importlib.resources import files
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from commlib import graph, ops
from commlib.graph.watching import runs
from tests.support.checks import assert_bits_equal, assert_equal, on_gpu
from tests.support.runs_on import runs_on

WIDTH, ROW = 16, 16 * 4  # of float32
BUCKETS = (8, 64, 2048)


def thresholds() -> list[int]:
    """Return the sizes in bytes, up to 2 MiB, at which two ranks change the kernel."""
    table = json.loads((files("commlib.p2p") / "table.json").read_text())
    return [row[0] for row in table["collectives"]["all_reduce"]["2"] if row[0] <= 2**21]


ROWS = [1, *(rows for most in thresholds() for rows in (most // ROW, most // ROW + 1))]


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def captured_now(on_gpu: bool) -> bool:
    """Return True in a capture. On a CPU this includes the runs before it and verified calls.

    A tracer takes the answer at the time of the trace, as it does with torch's query.
    """
    return torch.cuda.is_current_stream_capturing() if on_gpu else runs.inside()


class Reducing(nn.Module):
    """A matrix product and its sum over the ranks, in one form in captures and in another outside.

    It is made of operators that Inductor calls as they are, so that no C++ is compiled.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        weight = torch.randint(-3, 4, (WIDTH, WIDTH), generator=generator).float()
        self.weight = nn.Parameter(weight.to(device), requires_grad=False)
        self.register_buffer("eye", torch.eye(WIDTH, device=device))

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.weight
        if captured_now(x.is_cuda):
            return ops.all_reduce(product)
        buffer: Tensor = product @ self.eye  # type: ignore[operator]
        return ops.all_reduce(buffer)


def batch(turn: int, rows: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + 10 * rows + rank)
    return torch.randint(-4, 5, (rows, WIDTH), generator=generator).float()


def expected(turn: int, rows: int, size: int, module: Reducing) -> Tensor:
    """Return the sum in float64; all numbers are small integers, so that it is exact."""
    total = np.sum([batch(turn, rows, rank).double().numpy() for rank in range(size)], axis=0)
    return torch.tensor(total @ module.weight.double().cpu().numpy()).float()


def compiled(module: Reducing, backend: Any = "aot_eager") -> Callable[[Tensor], Tensor]:
    call: Callable[[Tensor], Tensor] = torch.compile(module, backend=backend, dynamic=True)
    return call


Call = Callable[[Tensor], Tensor]
STEPS = ("compile", "warm up", "capture")
ORDERS = [*permutations(STEPS), ("capture",)]  # the last one without compiled code


def taken(order: tuple[str, ...], module: Reducing, whole: Callable[[Call], Call]) -> list[Call]:
    """Take the steps in this order, each with two calls; return the functions that they made.

    Args:
        order: Some of ``STEPS``.
        module: What is compiled.
        whole: Returns the function that is called and captured, around the module or its code.
    """
    inner: Call = module
    calls: list[Call] = []
    for step in order:
        if step == "compile":
            inner = compiled(module)
        call = whole(inner)
        if step == "capture":
            call = graph.capture(call, outputs="copy")
        if step != "warm up":
            calls.append(call)
        for turn in range(2):
            call(batch(turn, BUCKETS[turn], 0).to(module.weight.device))
    return calls


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
@runs_on("unified_ranks")
def test_orders(comm: Any, order: tuple[str, ...]) -> None:
    """Every size on both sides of each threshold, from new graphs and from known ones."""
    torch._dynamo.reset()
    module = Reducing(comm.device)
    with torch.no_grad():
        calls = taken(order, module, lambda inner: inner)
        check_all_sizes(comm, module, calls)
        of_graphs = [x for x in calls if isinstance(x, graph.CapturedFunction)]
        assert_equal(len(of_graphs), 1, "captured functions")
        if "compile" not in order and not on_gpu(comm):  # on a GPU the answer is that of a call
            branch = graph.capture(lambda x: ops.all_reduce(x @ module.weight), outputs="copy")
            branch(batch(0, 3, 0))
            wanted = {row["nodes"] for row in graph.report(branch)}
            nodes = {row["nodes"] for x in of_graphs for row in graph.report(x)}
            assert_equal(nodes, wanted, "operators in graphs: those of the branch in captures")
    torch._dynamo.reset()


@pytest.mark.parametrize("first", ["capture", "backend"])
@runs_on("unified_ranks")
def test_compiled_in_the_first_call(comm: Any, first: str) -> None:
    """The trace is a part of the call that is captured, or the backend captures the code."""
    torch._dynamo.reset()
    module = Reducing(comm.device)
    code = compiled(module, graph.backend if first == "backend" else "aot_eager")
    call = graph.capture(code, outputs="copy") if first == "capture" else code
    with torch.no_grad():
        check_all_sizes(comm, module, [call])
    torch._dynamo.reset()


def check_all_sizes(comm: Any, module: Reducing, calls: list[Call]) -> None:
    for turn in range(4):
        for rows in ROWS:
            x = batch(turn, rows, comm.rank).to(comm.device)
            want = expected(turn, rows, comm.size, module)
            for number, call in enumerate(calls):
                assert_bits_equal(call(x), want, f"call {number}, {rows} rows, turn {turn}")


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
@runs_on("unified_ranks")
def test_padded_buckets_with_eager_parts(comm: Any, order: tuple[str, ...]) -> None:
    """Batches are padded to few sizes, and Python runs between two pieces of each graph."""
    torch._dynamo.reset()
    first, last = Reducing(comm.device), Reducing(comm.device)

    @graph.eager
    def between(x: Tensor) -> Tensor:
        most = 8 if int(x[:, 0].sum()) % 2 else 8.0  # the host reads a value
        return x.clamp(-most, most)

    with torch.no_grad():
        calls = taken(order, first, lambda inner: lambda x: last(between(inner(x))))
        for turn in range(4):
            for rows in (1, 5, 8, 9, 60, 1500):
                bucket = next(each for each in BUCKETS if rows <= each)
                x = torch.zeros(bucket, WIDTH, device=comm.device)
                x[:rows] = batch(turn, rows, comm.rank)
                middle = expected(turn, rows, comm.size, first).clamp(-8, 8).double().numpy()
                want = torch.tensor(comm.size * middle @ last.weight.double().cpu().numpy())
                for call in calls:
                    assert_bits_equal(call(x)[:rows], want.float(), f"{rows} rows, turn {turn}")
    for call in calls:
        if isinstance(call, graph.CapturedFunction):
            # A module that is compiled after its capture has other graphs from then on.
            replayed = [row for row in graph.report(call) if row["replays"]]
            assert_equal(len(replayed), len(BUCKETS), "graphs that are replayed, one per bucket")
            assert_equal({row["segments"] for row in replayed}, {2}, "around Python")
    torch._dynamo.reset()
