"""The push kernels in captured and compiled programs, and next to work on other streams."""

import contextlib
import gc
import random
from typing import Any

import torch

import commlib
import commlib.graph
from commlib import ops
from commlib.errors import (
    ArgumentError,
    GraphError,
    RingError,
    StreamError,
)
from commlib.streams import stream_captures
from tests.support.checks import assert_bits_equal, assert_equal, raises, settle
from tests.support.operator import calls, generating
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on
from tests.test_custom_allreduce import Script, another


def captured(comm: Any, items: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    x = torch.zeros(items, dtype=torch.bfloat16, device=comm.device)
    out, graph = torch.zeros_like(x), torch.cuda.CUDAGraph()
    gc.collect()  # a graph of another test that goes in a capture would end it
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        comm.all_reduce(out, x)
        comm.all_reduce(out, x, op="max", use_calc_stream=False)
        comm.all_reduce(out, x)
    return graph, x, out


def graphs(comm: Any) -> None:
    """Graphs of several sizes, captured before any eager call, replayed among eager ones."""
    with another(comm, 81) as ring:
        made = [captured(ring, items) for items in (5, 4096, 70_000, 700_000)]
        dice, script = random.Random(11), Script(ring, 12)
        for turn in range(120):
            graph, x, out = made[dice.randrange(len(made))]
            x.fill_(turn % 50 + comm.rank)
            out.fill_(-1)
            graph.replay()
            want = comm.size * (turn % 50) + comm.size * (comm.size - 1) // 2
            assert_equal(set(out.tolist()), {float(want)}, f"replay {turn} of {x.numel()}")
            script.call(check=True)


def test_graphs(gpu_ranks: Ranks) -> None:
    gpu_ranks(graphs)


def test_graphs_of_more_ranks(many_gpu_ranks: Ranks) -> None:
    many_gpu_ranks(graphs)


@runs_on("gpu_ranks", deadline=120)
def test_recapture(comm: Any) -> None:
    """A thousand captures leak no memory."""
    x = torch.ones(4096, dtype=torch.bfloat16, device=comm.device)
    pool, free = torch.cuda.graph_pool_handle(), []
    gc.collect()  # garbage of another test would give its memory back in between
    for turn in range(1000):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = comm.all_reduce(torch.zeros_like(x), x)
        if turn % 100 == 99:
            graph.replay()
            assert_equal(set(out.tolist()), {float(comm.size)}, f"capture {turn}")
            free.append(torch.cuda.memory_reserved() + len(comm._engine._push._order._tags))
        del graph, out
    assert_equal(free[1:], free[1:2] * (len(free) - 1), "memory after each hundred captures")


@runs_on("gpu_ranks")
def test_forked_streams(comm: Any) -> None:
    """Streams inside one graph, and eager streams, take the channel one after the other."""
    side = [torch.cuda.Stream() for _ in range(3)]
    x = torch.full((30_000,), 1.0, device=comm.device)
    outs = [torch.zeros_like(x) for _ in range(4)]

    def fan() -> None:
        current = torch.cuda.current_stream()
        for stream, out in zip(side, outs, strict=False):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000 * (comm.rank + 1))
                comm.all_reduce(out, x)
        comm.all_reduce(outs[3], x)
        for stream in side:
            current.wait_stream(stream)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        fan()
    for turn in range(30):
        for out in outs:
            out.zero_()
        if turn % 2:
            graph.replay()
        else:
            fan()
        for out in outs:
            assert_equal(set(out.tolist()), {float(comm.size)}, f"turn {turn}")


@runs_on("gpu_ranks")
def test_a_call_on_another_stream_waits(comm: Any) -> None:
    """A call waits for all that the stream of the call before it holds, the default one too."""
    default, one, other = torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    x, out = torch.zeros(64, device=comm.device), torch.zeros(64, device=comm.device)
    pairs = ((default, one), (one, default), (one, other), (default, other))
    for turn, (before, after) in enumerate(pairs, 1):
        torch.cuda.synchronize()
        with torch.cuda.stream(before):
            comm.all_reduce(torch.zeros_like(x), x)
            torch.cuda._sleep(100_000_000)
            x.fill_(turn)
        with torch.cuda.stream(after):
            comm.all_reduce(out, x)
        torch.cuda.synchronize()
        assert_equal(set(out.tolist()), {float(comm.size * turn)}, (before, after))


@runs_on("gpu_ranks")
def test_two_rings_at_once(comm: Any) -> None:
    """Two rings whose calls each fill the GPU, on two streams that the ranks come to unevenly."""
    with another(comm, 87, timeout=20) as one, another(comm, 88, timeout=20) as other:
        streams = [torch.cuda.Stream() for _ in range(2)]
        x = torch.ones(8_000_000, dtype=torch.bfloat16, device=comm.device)
        outs = [torch.zeros_like(x) for _ in streams]
        torch.cuda.synchronize()
        for turn in range(10):
            for ring, stream, out in zip((one, other), streams, outs, strict=True):
                with torch.cuda.stream(stream):
                    if (stream is streams[turn % 2]) == (comm.rank == 0):
                        torch.cuda._sleep(2_000_000)
                    ring.all_reduce(out, x)
        torch.cuda.synchronize()
        for ring, out in zip((one, other), outs, strict=True):
            ring.check()
            assert_equal(out.unique().tolist(), [float(comm.size)], "sums")


@runs_on("gpu_ranks")
def test_two_streams_at_once(comm: Any) -> None:
    """A replay during an eager call on another stream is an error that names both, no hang."""
    with another(comm, 82, timeout=20) as ring:
        graph, _, _ = captured(ring, 64)
        x, side = torch.ones(64, device=comm.device), torch.cuda.Stream()
        ring.all_reduce(x, x)
        torch.cuda.synchronize()
        ring.exchange([])
        if comm.rank == 0:
            with torch.cuda.stream(side):
                graph.replay()  # spins: the others have not begun
            ring.all_reduce(x, x)
            torch.cuda.synchronize()
            ring.exchange([])
        else:
            ring.exchange([])
            with contextlib.suppress(StreamError):
                ring.all_reduce(x, x)
            torch.cuda.synchronize()
        with raises(StreamError, "at the same time", "0x", "reset()"):
            ring.check()
        with raises(RingError, "reset()"):
            ring.all_reduce(x, x)
        ring.reset()
        graph.replay()
        assert_equal(set(ring.all_reduce(torch.zeros_like(x), torch.ones_like(x)).tolist()),
             {float(comm.size)}, "after reset")  # fmt: skip


@runs_on("ranks")
def test_split(comm: Any) -> None:
    """Between the halves other work runs; nothing else of the ring may come there."""
    for items in (1, 1000, 70_001, 700_000, 12_000_000):
        for dtype in (torch.bfloat16, torch.float32, torch.int64):
            x = torch.full((items,), comm.rank + 1).to(comm.device, dtype)
            out = torch.zeros_like(x)
            before = calls(comm)
            work = comm.all_reduce_begin(out, x)
            other = torch.ones(1000, device=comm.device) * 3
            work.wait()
            assert_equal(work.wait() is out, True, "the result, twice")
            want = comm.size * (comm.size + 1) // 2
            # Not ``unique``, which sorts: half a second for the largest.
            assert_equal([*map(float, out.aminmax())], [want] * 2, f"{items} x {dtype}")
            assert_equal(calls(comm) - before, 1, "calls")
            assert_equal(float(other.sum()), 3000.0, "work between")
            comm.all_reduce_begin(x, x, op="max").wait()
            assert_equal([*map(float, x.aminmax())], [comm.size] * 2, "in place, max")
    settle(comm)
    assert_equal(work.done(), True, "done")


@runs_on("gpu_ranks")
def test_split_wrongly(comm: Any) -> None:
    """A call between the halves is refused, and so is a wait in a graph for an eager begin."""
    x = torch.ones(100, device=comm.device)
    work = comm.all_reduce_begin(torch.zeros_like(x), x)
    with raises(ArgumentError, "split all_reduce", "wait()"):
        comm.all_reduce(x, x)
    assert_equal(set(work.wait().tolist()), {float(comm.size)}, "the split one")
    work, stray = comm.all_reduce_begin(torch.zeros_like(x), x), torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(stray, capture_error_mode="thread_local"),
        raises(ArgumentError, "in no graph", "wait() where it began"),
    ):
        x.add_(0)
        work.wait()
    assert_equal(set(work.wait().tolist()), {float(comm.size)}, "where it began")


@runs_on("gpu_ranks")
def test_split_in_a_capture(comm: Any) -> None:
    """A half without its other one ends with the capture; between both, other work is captured."""
    x = torch.ones(100, device=comm.device)
    graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(x)

    def fails() -> None:
        comm.all_reduce_begin(out, x)
        if stream_captures():  # torch's own question is answered as in eager calls
            raise ValueError("between the halves")

    def forgets() -> torch.Tensor:
        comm.all_reduce_begin(out, x)
        return x * 2

    with raises(GraphError, "between the halves"):
        commlib.graph.capture(fails)()
    forgetful = commlib.graph.capture(forgets)
    for turn in range(3):
        x.fill_(turn)
        assert_bits_equal(forgetful(), x * 2, "a half that nobody waits for")
        assert_equal(set(out.tolist()), {float(comm.size * turn)}, "ended all the same")
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        half = comm.all_reduce_begin(out, x)
        y = x * 2
        half.wait()
    for turn in range(3):
        x.fill_(turn)
        graph.replay()
        assert_equal(set(out.tolist()), {float(comm.size * turn)}, "captured")
        assert_equal(set(y.tolist()), {2.0 * turn}, "between")


def doubled(x: torch.Tensor) -> Any:
    return ops.all_reduce(x * 2) + 1


def compiled(comm: Any, mode: str) -> None:
    """Traced before any capture, and run at many sizes: eager's bits."""
    after_runs(comm, mode)


def after_runs(comm: Any, mode: str) -> Any:
    """Return what is compiled, after its runs."""
    torch.compiler.reset()
    fast: Any = torch.compile(doubled, fullgraph=True, dynamic=True, mode=mode)
    sizes = [100, 300_000, 7, 64]
    for items in (*sizes, *sizes):
        x = torch.full((items,), 1.0 + comm.rank, dtype=torch.bfloat16, device=comm.device)
        assert_bits_equal(fast(x).clone(), doubled(x), f"{items} items")
    return fast


def compiled_and_captured(comm: Any) -> None:
    """A compiled function is captured by hand after its first runs."""
    fast = after_runs(comm, "default")
    x = torch.ones(64, dtype=torch.bfloat16, device=comm.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = fast(x)
    for turn in range(3):
        x.fill_(turn)
        graph.replay()
        assert_bits_equal(y, doubled(x), "captured")


def test_compiled(unified_ranks: Ranks) -> None:
    generating(unified_ranks)(compiled, "default", deadline=240)


def test_compiled_with_graphs(gpu_ranks: Ranks) -> None:
    generating(gpu_ranks)(compiled, "reduce-overhead", deadline=240)


def test_compiled_and_captured(gpu_ranks: Ranks) -> None:
    generating(gpu_ranks)(compiled_and_captured, deadline=240)
