"""CommContext.exchange_rows: any rows from any rank to any other, each to its place."""

from itertools import product
from typing import Any

import numpy as np
import torch

import commlib
from commlib.errors import CommTimeout, EngineError, RingError
from commlib.p2p.routes import routes
from tests.support.checks import (
    Framed,
    assert_bits_equal,
    assert_equal,
    bits,
    from_bits,
    raises,
    sample,
)
from tests.support.operator import MODES, calls
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

Counts = np.ndarray[Any, Any]  # [from, to, segment]: rows


def drawn(size: int, segments: int, most: int, seed: int) -> Counts:
    return np.random.default_rng(seed).integers(0, most, (size, size, segments), endpoint=True)


def arrived(rank: int, counts: Counts, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The rows of ``rank`` in NumPy: of every segment, of every sender."""
    size, _, segments = counts.shape
    arrays, parts = [bits(x) for x in inputs], []
    for k, a in product(range(segments), range(size)):
        start = int(counts[a].reshape(-1)[: rank * segments + k].sum())
        parts.append(arrays[a][start : start + counts[a, rank, k]])
    return from_bits(np.concatenate(parts), inputs[0].dtype)


def check(comm: Any, counts: Counts, width: int, dtype: torch.dtype, **mode: bool) -> None:
    every = [sample(r, (int(counts[r].sum()), width), dtype) for r in range(comm.size)]
    want = arrived(comm.rank, counts, every)
    x, way = every[comm.rank].to(comm.device), routes(counts, comm.rank, back=False)
    out = torch.zeros(want.shape, dtype=dtype, device=comm.device)
    result = comm._exchange_rows(out, x, way, **mode)
    assert_bits_equal(
        result.wait() if isinstance(result, commlib.Work) else result, want, (counts, mode)
    )
    back = torch.zeros_like(x)
    result = comm._exchange_rows(back, out, routes(counts, comm.rank, back=True), **mode)
    assert_bits_equal(
        result.wait() if isinstance(result, commlib.Work) else result, x, ("back", counts, mode)
    )


def values(comm: Any) -> None:
    """Few and many rows, odd widths, all modes, dtypes that no engine has."""
    for seed, (most, width) in enumerate([(0, 4), (1, 1), (3, 0), (5, 7), (40, 16), (7, 24)]):
        counts = drawn(comm.size, 1 + seed % 3, most, seed)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128):
            for mode in MODES.values():
                check(comm, counts, width, dtype, **mode)


def test_values(ranks: Ranks) -> None:
    ranks(values)


def test_values_of_three(three_ranks: Ranks) -> None:
    three_ranks(values)


@runs_on("ranks")
def test_large(comm: Any) -> None:
    """More bytes than fit into the channel at once, and rows that one sender alone has."""
    lopsided = np.zeros((comm.size, comm.size, 2), int)
    lopsided[0, -1] = 3000, 1
    with commlib.flags.override("FLAGS_comm_channel_mib", 2):
        ring = commlib.new_ring(60, range(comm.size))
        for counts in (drawn(comm.size, 2, 900, 1), lopsided, lopsided, lopsided):
            for width in (1023, 512):
                check(ring, counts, width, torch.float32)
        check(comm, drawn(comm.size, 300, 2, 3), 8, torch.int64)  # too many segments for it
        commlib.CommContextManager.instance().close(60)


@runs_on("ranks")
def test_strided(comm: Any) -> None:
    """Views on both sides, one of them off any alignment, and no byte next to them."""
    counts, way = drawn(comm.size, 2, 9, 5), None
    every = [sample(r, (int(counts[r].sum()), 6), torch.int8) for r in range(comm.size)]
    want, way = arrived(comm.rank, counts, every), routes(counts, comm.rank, back=False)
    for layout in ("contiguous", "transposed", "stepped"):
        x = Framed(tuple(every[comm.rank].shape), torch.int8, comm.device, layout)
        out = Framed(tuple(want.shape), torch.int8, comm.device, layout)
        comm._exchange_rows(out.view, x.view.copy_(every[comm.rank]), way)
        assert_bits_equal(out.view, want, layout)
        out.intact(layout)
    flat = torch.zeros(every[comm.rank].numel() + 1, dtype=torch.int8, device=comm.device)
    x1 = flat[1:].view(every[comm.rank].shape).copy_(every[comm.rank])
    result = torch.zeros(want.shape, dtype=torch.int8, device=comm.device)
    assert_bits_equal(comm._exchange_rows(result, x1, way), want, "one byte off")


@runs_on("all_gpu_ranks")
def test_streams_and_graphs(comm: Any) -> None:
    """Calls from several streams at once, and in a graph that is replayed among them."""
    counts = drawn(comm.size, 2, 200, 8)
    every = [sample(r, (int(counts[r].sum()), 64), torch.float32) for r in range(comm.size)]
    want, way = arrived(comm.rank, counts, every), routes(counts, comm.rank, back=False)
    x = every[comm.rank].to(comm.device)
    out, side = torch.zeros(want.shape, device=comm.device), torch.cuda.Stream(comm.device)
    default = torch.cuda.default_stream(comm.device)
    comm._exchange_rows(out, x, way)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        comm._exchange_rows(out, x, way)
        comm._exchange_rows(out, x, way, use_calc_stream=False)
    for turn in range(20):
        out.zero_()
        torch.cuda.synchronize(comm.device)
        if turn % 3 == 0:
            graph.replay()
            torch.cuda.synchronize(comm.device)
        else:
            first, then = (side, default) if turn % 3 == 1 else (default, side)
            other = torch.zeros_like(out)
            with torch.cuda.stream(first):
                comm._exchange_rows(out, x, way)
            with torch.cuda.stream(then):
                assert_bits_equal(comm._exchange_rows(other, x, way), want, "after another stream")
        torch.cuda.synchronize(comm.device)
        assert_bits_equal(out, want, f"turn {turn}")


@runs_on("ranks")
def test_on_a_closed_ring(comm: Any) -> None:
    ring = commlib.new_ring(61, range(comm.size))
    assert ring is not None
    before = calls(ring)
    commlib.CommContextManager.instance().close(61)
    x = torch.zeros(2, 2, device=comm.device)
    with raises(RingError, "closed"):
        ring._exchange_rows(
            torch.zeros_like(x), x, routes(drawn(comm.size, 1, 1, 1), comm.rank, back=False)
        )
    assert_equal(before, 0, "calls")


@runs_on("gpu_ranks")
def test_the_channel_is_used(comm: Any) -> None:
    """On the NCCL engine the rows of one host pass the channel by themselves."""
    from commlib.p2p.experts.rows import RowChannel

    check(comm, drawn(comm.size, 2, 4, 2), 8, torch.float32)
    assert_equal(type(comm._engine._rows.channel), RowChannel, "what carries the rows")


@runs_on("gpu_ranks")
def test_a_peer_that_does_not_come(comm: Any) -> None:
    """A peer that does not come is named at the next call; the ring can be created again."""
    counts = drawn(comm.size, 1, 50, 3) + 1
    check(comm, counts, 64, torch.float32)  # compiles the kernels
    ring = commlib.new_ring(62, range(comm.size), timeout=5)
    assert ring is not None
    check(ring, counts, 64, torch.float32)
    if comm.rank == 0:
        every = torch.zeros((int(counts[0].sum()), 64), device=comm.device)
        out = torch.zeros((int(counts[:, 0].sum()), 64), device=comm.device)
        ring._exchange_rows(out, every, routes(counts, 0, back=False))
        torch.cuda.synchronize(comm.device)
        with raises((CommTimeout, EngineError), "waiting for rank 1", "5 s"):
            ring._exchange_rows(out, every, routes(counts, 0, back=False))
    comm.exchange([])
    commlib.CommContextManager.instance().close(62, abort=True)
    again = commlib.new_ring(62, range(comm.size))
    check(again, counts, 64, torch.float32)
    commlib.CommContextManager.instance().close(62)
