"""Expert exchanges on a GPU that other rings take parts of: on GPUs only."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import commlib
from commlib import ops
from commlib.ops.expert_parallel.handle import Dispatched
from tests.support.checks import assert_equal
from tests.support.runs_on import runs_on

MIB = 1 << 20
LATE_S = 20.0
STEP = 50_000_000  # cycles between the starts of two graphs
TOKENS, WIDTH, EXPERTS, CHOICES = 8192, 1024, 16, 8  # twice as many rows per pair as slots
CAPACITY = 2 * TOKENS * CHOICES // EXPERTS * 5 // 4


def graph_of(stream: torch.cuda.Stream, call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture a call by hand, on a stream."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()
    return graph


def assert_same(result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare bits on the GPU: copying them to the host takes seconds."""
    same = torch.equal(result.view(torch.int16), expected.view(torch.int16))
    assert_equal(same, True, f"{what}: the same bits")


class Exchange:
    """A dispatch of many tokens, or the combine of their rows, with one result per call."""

    def __init__(self, comm: Any, way: str) -> None:
        values = torch.Generator(comm.device).manual_seed(comm.rank)
        self._x = torch.randn(
            TOKENS, WIDTH, dtype=torch.bfloat16, device=comm.device, generator=values
        )
        scores = torch.rand(TOKENS, EXPERTS, device=comm.device, generator=values)
        self._ids = scores.topk(CHOICES, dim=1).indices
        self._sent = self._dispatch()
        self._way = way
        self.result = self._x

    def _dispatch(self) -> Dispatched:
        return ops.expert_dispatch(self._x, self._ids, EXPERTS, CAPACITY)

    def __call__(self) -> None:
        if self._way == "dispatch":
            self.result = self._dispatch().rows
        else:
            self.result = ops.expert_combine(self._sent.rows, self._sent.handle)


@pytest.mark.parametrize("way", ["dispatch", "combine"])
@pytest.mark.parametrize("before", [([1], [2]), ([1, 2], [3]), ([1, 3], [2])])
@runs_on("gpu_ranks")
def test_experts_between_other_rings(
    comm: Any, way: str, before: tuple[Sequence[int], Sequence[int]]
) -> None:
    """On each rank the exchange starts while kernels of other rings wait for the other rank."""
    exchange = Exchange(comm, way)
    exchange()
    expected = exchange.result.clone()
    rings = [commlib.new_ring(140 + i, [0, 1], timeout=LATE_S) for i in (1, 2, 3)]
    x = torch.full((32 * MIB,), comm.rank + 1.0, dtype=torch.bfloat16, device=comm.device)
    outs = [torch.zeros_like(x) for _ in rings]
    calls: list[Callable[[], Any]] = [exchange]
    for ring, out in zip(rings, outs, strict=True):
        calls.append(lambda ring=ring, out=out: ring.all_reduce(out, x))
    streams = [torch.cuda.Stream() for _ in calls]
    graphs = [graph_of(stream, call) for stream, call in zip(streams, calls, strict=True)]
    first, last = before[comm.rank], before[1 - comm.rank]
    for _ in range(3):
        exchange.result.zero_()
        torch.cuda.synchronize()
        comm.exchange([])
        for position, i in enumerate([*first, 0, *last]):
            with torch.cuda.stream(streams[i]):
                torch.cuda._sleep(1 + STEP * position)
                graphs[i].replay()
        torch.cuda.synchronize()
        for ring in (comm, *rings):
            ring.check()
        assert_same(exchange.result, expected, f"{way} between other rings")
        for i in (*first, *last):
            assert_same(outs[i - 1], torch.full_like(x, 3.0), f"sum of ring {140 + i}")
    del graphs
