"""A module that branches on "am I captured", compiled before, in and after captures.

A tracer that runs before the capture fixes the branch that the program takes outside captures. Its
code must give the right numbers from graphs too, below and above every size at which another kernel
carries the reduction.
"""

import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from commlib import graph, ops
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.runs_on import runs_on

WIDTH, ROW = 16, 16 * 4  # of float32
BUCKETS = (8, 64, 2048)


def thresholds() -> list[int]:
    """Return the sizes in bytes, up to 2 MiB, at which two ranks change the kernel."""
    table = json.loads((files("commlib.p2p") / "table.json").read_text())
    return [row[0] for row in table["collectives"]["all_reduce"]["2"] if row[0] <= 2**21]


ROWS = [1, *(rows for most in thresholds() for rows in (most // ROW, most // ROW + 1))]


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
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
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
    found: Callable[[Tensor], Tensor] = torch.compile(module, backend=backend, dynamic=True)
    return found


def compiled_first(module: Reducing) -> Callable[[Tensor], Tensor]:
    code = compiled(module)
    for turn in range(2):
        code(batch(turn, 3 + turn, 0).to(module.weight.device))
    return graph.capture(code, outputs="copy")


def warmed_up_first(module: Reducing) -> Callable[[Tensor], Tensor]:
    x = batch(0, 3, 0).to(module.weight.device)
    module(x)
    code = compiled(module)
    captured = graph.capture(module, outputs="copy")
    captured(x)  # the module itself is captured before its code is compiled
    code(x)
    return graph.capture(code, outputs="copy")


ORDERS: dict[str, Callable[[Reducing], Callable[[Tensor], Tensor]]] = {
    "not compiled": lambda module: graph.capture(module, outputs="copy"),
    "compiled in the first call": lambda module: graph.capture(compiled(module), outputs="copy"),
    "compiled before": compiled_first,
    "warmed up, captured, compiled": warmed_up_first,
    "backend": lambda module: compiled(module, graph.backend),
}


@pytest.mark.parametrize("order", ORDERS)
@runs_on("unified_ranks")
def test_orders(comm: Any, order: str) -> None:
    """Every size on both sides of each threshold, from new graphs and from known ones."""
    torch._dynamo.reset()
    module = Reducing(comm.device)
    call = ORDERS[order](module)
    with torch.no_grad():
        for turn in range(4):
            for rows in ROWS:
                found = call(batch(turn, rows, comm.rank).to(comm.device))
                want = expected(turn, rows, comm.size, module)
                assert_bits_equal(found, want, f"{rows} rows, turn {turn}")
    torch._dynamo.reset()


@runs_on("unified_ranks")
def test_padded_buckets_with_eager_parts(comm: Any) -> None:
    """Batches are padded to few sizes, and Python runs between two pieces of the graph."""
    torch._dynamo.reset()
    first, last = Reducing(comm.device), Reducing(comm.device)
    code, lines = compiled(first), list[int]()

    @graph.eager
    def between(x: Tensor) -> Tensor:
        lines.append(int(x[:, 0].sum()))  # the host reads a value
        return x.clamp(-8, 8)

    @graph.capture(outputs="copy")
    def padded(x: Tensor) -> Tensor:
        found: Tensor = last(between(code(x)))
        return found

    with torch.no_grad():
        for turn in range(4):
            for rows in (1, 5, 8, 9, 60, 1500):
                bucket = next(each for each in BUCKETS if rows <= each)
                x = torch.zeros(bucket, WIDTH, device=comm.device)
                x[:rows] = batch(turn, rows, comm.rank)
                found = padded(x)[:rows]
                middle = expected(turn, rows, comm.size, first).clamp(-8, 8).double().numpy()
                want = torch.tensor(comm.size * middle @ last.weight.double().cpu().numpy())
                assert_bits_equal(found, want.float(), f"{rows} rows, turn {turn}")
    assert_equal(len(graph.report(padded)), len(BUCKETS), "graphs, one per bucket")
    torch._dynamo.reset()
