"""The push kernels: their bits, their order with streams and graphs, and what a lost peer does.

The CPU engine runs the same programs where they have a meaning there; what only hardware shows
returns at once elsewhere.
"""

import contextlib
import gc
import os
import random
import signal
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import commlib
import commlib.graph
from commlib import ops
from commlib.errors import (
    ArgumentError,
    CommTimeout,
    EngineError,
    GraphError,
    PeerTimeout,
    RingError,
    StreamError,
)
from commlib.p2p import kernel_table, peer_memory, push_collectives
from commlib.streams import stream_captures
from tests.support.checks import bits, close, refused, rounded, same, settle, wide
from tests.support.operator import calls, generating
from tests.support.processes import run
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SPECIALS = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40, 3e38, 6e-8)
LATE_S = 5.0  # a ring must be created within it, on a busy machine too


def on_gpu(comm: Any) -> bool:
    return bool(comm.device.type == "cuda")


@contextlib.contextmanager
def another(comm: Any, ring_id: int, timeout: float | None = None) -> Iterator[Any]:
    """Give a ring of the same ranks, aborted after the block: it may be broken by then."""
    yield commlib.new_ring(ring_id, range(comm.size), timeout=timeout)
    commlib.CommContextManager.instance().close(ring_id, abort=True)


def drawn(seed: int, items: int, dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    """Return every rank's tensor: normal values, and at the front all pairs of special ones."""
    values = np.random.default_rng(seed)
    inputs = [rounded(values.standard_normal(items), dtype) for _ in range(size)]
    count = min(items, len(SPECIALS) ** 2)
    for rank, x in enumerate(inputs):
        for i in range(count):
            x[i] = SPECIALS[i // len(SPECIALS) if rank % 2 else i % len(SPECIALS)]
    return inputs


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in rank order in float32 from +0, round once, and give zeros no sign."""
    total = np.zeros(inputs[0].shape, np.float32)
    with np.errstate(all="ignore"):
        for rank, x in enumerate(inputs):
            each = wide(x).astype(np.float32)
            if op in ("sum", "avg"):
                total = total + each
            else:
                total = each if rank == 0 else _EXTREME[op](total, each)
        if op == "avg":
            total = total / np.float32(len(inputs))
    result = torch.from_numpy(total).to(inputs[0].dtype)
    return torch.where(result == 0, torch.zeros_like(result), result)


_EXTREME = {"max": np.maximum, "min": np.minimum}


def alike(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """Raise unless all bits are equal; NaNs count as equal."""
    fixed = torch.where(actual.cpu().isnan(), torch.full_like(expected, float("nan")), actual.cpu())
    wanted = torch.where(expected.isnan(), torch.full_like(expected, float("nan")), expected)
    close(fixed, wanted, what)


def equal_everywhere(comm: Any, x: torch.Tensor, what: object) -> None:
    """Raise unless all ranks hold the same bits, NaNs included."""
    found = comm.exchange([zlib.crc32(bits(x).tobytes())])
    same(found, [found[0]] * comm.size, f"{what}: digest of the bits on each rank")


def values(comm: Any, sizes: list[int]) -> None:
    """Any byte count, place and operation gives the stated reference, on all ranks alike."""
    for items in sizes:
        for dtype in FLOATS:
            for op in ("sum", "avg", "max", "min"):
                inputs = drawn(items, items, dtype, comm.size)
                want, what = reduced(inputs, op), f"{op} of {items} x {dtype}"
                flat = torch.zeros(items + 1, dtype=dtype, device=comm.device)
                for shift in (0, 1):
                    x = flat[shift : shift + items].copy_(inputs[comm.rank])
                    out = torch.full_like(x, 7)
                    alike(comm.all_reduce(out, x, op=op), want, what)
                    equal_everywhere(comm, out, what)
                    alike(x, inputs[comm.rank], f"{what}: x afterwards")
                    alike(comm.all_reduce(x, x, op=op), want, f"{what} in place")


SMALL = [1, 2, 3, 7, 8, 9, 63, 64, 65, 511, 1025, 4099]
LARGE = [32768, 70001, 131073, 300007, 1_000_003, 4_194_304, 20_000_001]


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_values(gpu_ranks: Ranks, sizes: list[int]) -> None:
    gpu_ranks(values, sizes, deadline=240)


def test_values_of_more_ranks(gpu_crowd: Ranks) -> None:
    gpu_crowd(values, [1, 9, 1025, 20_011, 70_001, 300_007, 1_000_003], deadline=240)


@runs_on("gpu_ranks", deadline=120)
def test_every_length(comm: Any) -> None:
    """Every odd number of bytes up to 600, and some up to 64 KiB, moved."""
    for nbytes in [*range(1, 600, 2), *range(601, 65536, 997)]:
        parts = [
            torch.arange(nbytes, dtype=torch.int32).add(7 * r).byte() for r in range(comm.size)
        ]
        x = parts[comm.rank].to(comm.device)
        out = torch.zeros(comm.size * nbytes, dtype=torch.uint8, device=comm.device)
        close(comm.all_gather(out, x), torch.cat(parts), f"{nbytes} bytes")


def movements(comm: Any, part: int) -> None:
    """all_gather, all_to_all and reduce_scatter, at sizes on both sides of what is pushed."""
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8):
        every = [
            torch.arange(part * comm.size).add(1000 * r).remainder(97).to(dtype)
            for r in range(comm.size)
        ]
        x = every[comm.rank].to(comm.device)
        segments = [t.view(comm.size, part) for t in every]
        out = torch.zeros(comm.size * part, dtype=dtype, device=comm.device)
        want = torch.cat([p[comm.rank] for p in segments])
        close(comm.all_to_all(out, x), want, f"all_to_all {part} {dtype}")
        close(comm.all_gather(out, x[:part]), torch.cat([t[:part] for t in every]), "all_gather")
        inside = out[comm.rank * part : (comm.rank + 1) * part]
        inside.copy_(x[:part])
        close(comm.all_gather(out, inside), torch.cat([t[:part] for t in every]), "in place")
        if dtype.itemsize > 1:
            total = (
                torch.stack(segments)[:, comm.rank].double().sum(0).to(dtype)
            )  # small whole numbers
            close(comm.reduce_scatter(out[:part], x), total, f"reduce_scatter {part} {dtype}")
            close(comm.reduce_scatter(x.view(comm.size, -1)[comm.rank], x), total, "in place")


@pytest.mark.parametrize("part", [1, 3, 1000, 40_001, 600_000])
def test_movements(unified_ranks: Ranks, part: int) -> None:
    unified_ranks(movements, part)


def test_movements_of_more_ranks(crowd: Ranks) -> None:
    for part in (3, 40_001):
        crowd(movements, part)


class Script:
    """The same mixed calls on every rank, each checked against what they must give."""

    def __init__(self, comm: Any, seed: int) -> None:
        self.comm, self.dice = comm, random.Random(seed)
        most = 1 << 19
        # Whole numbers whose sums are exact: right in any order, so on every engine.
        self.inputs = [
            rounded(np.random.default_rng(r).integers(-16, 17, most), torch.bfloat16)
            for r in range(comm.size)
        ]
        self.x = self.inputs[comm.rank].to(comm.device)
        self.out = torch.zeros(most, dtype=torch.bfloat16, device=comm.device)
        self.gathered = torch.zeros(comm.size << 12, dtype=torch.bfloat16, device=comm.device)
        self.total = reduced(self.inputs, "sum").to(comm.device)

    def call(self, check: bool) -> None:
        """Make one call of a random kind and size."""
        comm, items = self.comm, 1 << self.dice.randrange(0, 19)
        items = self.dice.randint(items, 2 * items)
        kind = self.dice.random()
        if kind < 0.7:
            comm.all_reduce(self.out[:items], self.x[:items])
            wrong = check and not torch.equal(self.out[:items], self.total[:items])
        elif kind < 0.8:
            part = self.x[: (items % 4096) + 1]
            gathered = self.gathered[: comm.size * len(part)]
            comm.all_gather(gathered, part)
            want = torch.cat([x[: len(part)] for x in self.inputs])
            wrong = check and not torch.equal(gathered.cpu(), want)
        elif kind < 0.9:
            whole = self.x[: items // comm.size * comm.size]
            part = self.out[: len(whole) // comm.size]
            comm.reduce_scatter(part, whole)
            own = self.total[: len(whole)].chunk(comm.size)[comm.rank] if len(whole) else part
            wrong = check and not torch.equal(part, own)
        else:
            work = comm.all_reduce_begin(self.out[:items], self.x[:items])
            self.x.add_(0)
            work.wait()
            wrong = check and not torch.equal(self.out[:items], self.total[:items])
        same(wrong, False, f"{items} items, kind {kind}")


def mixed(comm: Any, count: int, seed: int) -> None:
    """Random calls while each rank is held up at random; every so many are checked."""
    if not on_gpu(comm):
        count = 50
    script, own = Script(comm, seed), random.Random(seed * 8 + comm.rank)
    for number in range(count):
        if on_gpu(comm) and own.random() < 0.05:
            torch.cuda._sleep(own.randrange(200_000))
        script.call(check=number % 7 == 0 or count - number < 20)
    settle(comm)


def test_mixed_calls(unified_ranks: Ranks, request: pytest.FixtureRequest) -> None:
    unified_ranks(mixed, request.config.getoption("mixed_calls"), 3, deadline=900)


def test_mixed_calls_of_more_ranks(crowd: Ranks, request: pytest.FixtureRequest) -> None:
    crowd(mixed, request.config.getoption("mixed_calls"), 4, deadline=900)


@runs_on("gpu_ranks")
def test_call_numbers_wrap(comm: Any) -> None:
    """The numbers of calls and of blocks pass 2**32: halves go on taking turns."""
    with another(comm, 80) as ring:
        torch.cuda.synchronize()
        ring.exchange([])
        call, blocks = 2**32 - 8, 2**32 - 3  # Control in channel.cuh
        words = struct.pack("<IIQQI", call, blocks, 0, call % 2**11 << 53, blocks)
        ring._engine._push._memory.put(0, words)
        ring.exchange([])
        mixed(ring, 40, 5)


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
            same(set(out.tolist()), {float(want)}, f"replay {turn} of {x.numel()}")
            script.call(check=True)


def test_graphs(gpu_ranks: Ranks) -> None:
    gpu_ranks(graphs)


def test_graphs_of_more_ranks(gpu_crowd: Ranks) -> None:
    gpu_crowd(graphs)


@runs_on("gpu_ranks", deadline=120)
def test_recapture(comm: Any) -> None:
    """A thousand captures leak no memory."""
    x = torch.ones(4096, dtype=torch.bfloat16, device=comm.device)
    pool, free = torch.cuda.graph_pool_handle(), []
    for turn in range(1000):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = comm.all_reduce(torch.zeros_like(x), x)
        if turn % 100 == 99:
            graph.replay()
            same(set(out.tolist()), {float(comm.size)}, f"capture {turn}")
            free.append(torch.cuda.memory_reserved() + len(comm._engine._push._order._tags))
        del graph, out
    same(free[1:], free[1:2] * (len(free) - 1), "memory after each hundred captures")


@runs_on("gpu_ranks")
def test_forked_streams(comm: Any) -> None:
    """Streams inside one graph, and eager streams, take the channel one after the other."""
    side = [torch.cuda.Stream() for _ in range(3)]
    x = torch.full((30_000,), 1.0, device=comm.device)
    outs = [torch.zeros_like(x) for _ in range(4)]

    def fan() -> None:
        here = torch.cuda.current_stream()
        for stream, out in zip(side, outs, strict=False):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000 * (comm.rank + 1))
                comm.all_reduce(out, x)
        comm.all_reduce(outs[3], x)
        for stream in side:
            here.wait_stream(stream)

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
            same(set(out.tolist()), {float(comm.size)}, f"turn {turn}")


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
        same(set(out.tolist()), {float(comm.size * turn)}, (before, after))


@runs_on("gpu_ranks")
def test_a_rank_that_cannot_compile(comm: Any) -> None:
    """Where one rank can't compile the kernels, all ranks use NCCL, and say why."""
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank:
            patch.setattr(push_collectives, "FILES", ("missing.cu",))
        with another(comm, 89) as ring:
            same("can't compile" in ring.explain(1024, torch.bfloat16), True, "explain")
            x = torch.ones(8, device=comm.device)
            same(set(ring.all_reduce(x, x).tolist()), {float(comm.size)}, "sum")


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
            same(out.unique().tolist(), [float(comm.size)], "sums")


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
        with refused(StreamError, "at the same time", "0x", "reset()"):
            ring.check()
        with refused(RingError, "reset()"):
            ring.all_reduce(x, x)
        ring.reset()
        graph.replay()
        same(set(ring.all_reduce(torch.zeros_like(x), torch.ones_like(x)).tolist()),
             {float(comm.size)}, "after reset")  # fmt: skip


def late(comm: Any, how: str) -> None:
    """A peer that does not come is named on every rank; reset() repairs, graphs stay valid."""
    with another(comm, 83, timeout=LATE_S) as ring:
        graph, x, out = captured(ring, 300_000 if how == "large graph" else 1000)
        torch.cuda.synchronize()
        ring.exchange([])
        if comm.rank != comm.size - 1:
            for _ in range(3):  # what follows the fault leaves at once
                if how == "eager":
                    with contextlib.suppress(PeerTimeout, RingError):
                        ring.all_reduce(out, x)
                else:
                    graph.replay()
            torch.cuda.synchronize()
            same(bool(out.isnan().all()), True, "results are NaN")
        gathered = torch.zeros(comm.size * 5, dtype=torch.int64, device=comm.device)
        if comm.rank != comm.size - 1 and how == "graph":
            ring._engine._push._word.value, kept = (
                0,
                ring._engine._push._word.value,
            )  # launched all the same
            ring.all_gather(gathered, gathered[:5])
            torch.cuda.synchronize()
            same(gathered.unique().tolist(), [-1], "what moved")
            same(ring._engine._push._word.value, kept, "the same fault")
        comm.exchange([])
        if comm.rank == comm.size - 1 and how != "eager":
            graph.replay()  # too late
        if comm.rank == comm.size - 1 and how == "eager":
            with contextlib.suppress(PeerTimeout):
                ring.all_reduce(out, x)
        torch.cuda.synchronize()
        words = (f"waiting for rank {comm.size - 1}", "all_reduce", "(call", f"{LATE_S:g} s")
        seen = ring._health.fault is not None
        with refused(RingError if seen else PeerTimeout, *(("reset()",) if seen else words)):
            ring.check()
        same(any(words[0] in text for text in ring._errors()), True, f"errors {ring._errors()}")
        ring.reset()
        for turn in range(3):
            x.fill_(turn + 1)
            graph.replay()
            same(set(out.tolist()), {comm.size * (turn + 1.0)}, "replay after reset")
            ring.all_reduce(out, x)
        torch.cuda.synchronize()
        ring.check()


@pytest.mark.parametrize("how", ["eager", "graph", "large graph"])
def test_a_peer_that_does_not_come(gpu_ranks: Ranks, how: str) -> None:
    gpu_ranks(late, how)


@runs_on("gpu_ranks")
def test_calls_of_nccl_behind_a_lost_peer(comm: Any) -> None:
    """Calls of NCCL that wait after the fault for that peer end too: reset() connects again."""
    with another(comm, 87, timeout=30) as ring:
        ring.connect()  # which may take longer than the deadline below
        ring.timeout = LATE_S
        ring._engine._push._set_limit()
        x, ints = torch.ones(1000, device=comm.device), torch.ones(9, device=comm.device).long()
        held = commlib.graph.capture(lambda x: ring.all_reduce(torch.empty_like(x), x) + 1)
        for given in (x, ints):
            same(set(held(given).tolist()), {comm.size + 1.0}, "captured")
        ring.barrier()
        torch.cuda.synchronize()
        ring.exchange([])
        if comm.rank != comm.size - 1:
            out = torch.empty_like(x)
            with contextlib.suppress(PeerTimeout, RingError):
                ring.all_reduce(out, x)
                ring.all_reduce(ints, ints)
                ring.barrier()
        ring.reset()
        ints.fill_(1)
        for given in (x, ints):
            same(set(held(given).tolist()), {comm.size + 1.0}, "captured again")
            same(set(ring.all_reduce(torch.empty_like(given), given).tolist()), {comm.size},
                 "after reset")  # fmt: skip
        ring.barrier()
        torch.cuda.synchronize()
        ring.check()


def test_a_peer_that_does_not_come_of_more(gpu_crowd: Ranks) -> None:
    gpu_crowd(late, "graph")


@runs_on("unified_ranks", lost=frozenset([1]), deadline=90)
def test_a_killed_peer(comm: Any) -> None:
    """A peer whose process is gone is named within the deadline; the ring can't be repaired."""
    with another(comm, 86, timeout=LATE_S) as ring:
        x = torch.ones(1000, device=comm.device)
        ring.all_reduce(x, x)
        ring.barrier()
        settle(comm)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with refused((PeerTimeout, RingError, CommTimeout, EngineError)):
            ring.all_reduce(x, x)
            settle(comm)
            ring.check()
        if on_gpu(comm):
            same("waiting for rank 1 in all_reduce" in ring._errors()[0], True, ring._errors())
            same(bool(x.isnan().all()), True, "results are NaN")
            same(float(torch.ones(5, device=comm.device).sum()), 5.0, "the device still works")
            with refused((CommTimeout, EngineError), "exchange"):
                ring.reset()
    commlib.shutdown(abort=True)


@pytest.mark.gpu
@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_allocators(allocator: str) -> None:
    """User memory is never shared, so no setting of torch's allocator matters."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    code, out, err = run(
        *launcher,
        "tests/programs/allocators.py",
        PYTORCH_CUDA_ALLOC_CONF=allocator,
        FLAGS_dynamic_static_unified_comm="1",
    )
    assert code == 0, err
    assert "right" in out


@runs_on("ranks")
def test_reset_of_a_whole_ring(comm: Any) -> None:
    """reset() and check() of a ring without any fault change nothing, on every engine."""
    with another(comm, 84) as ring:
        ring.check()
        ring.reset()
        x = torch.ones(9, device=comm.device)
        same(set(ring.all_reduce(x, x).tolist()), {float(comm.size)}, "after reset")
    with refused(RingError, "aborted"):
        ring.check()
    with refused(RingError, "aborted"):
        ring.reset()


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
            same(work.wait() is out, True, "the result, twice")
            want = comm.size * (comm.size + 1) // 2
            same(out.unique().tolist(), [want], f"{items} x {dtype}")
            same(calls(comm) - before, 1, "calls")
            same(float(other.sum()), 3000.0, "work between")
            comm.all_reduce_begin(x, x, op="max").wait()
            same(x.unique().tolist(), [comm.size], "in place, max")
    settle(comm)
    same(work.done(), True, "done")


@runs_on("gpu_ranks")
def test_split_wrongly_and_captured(comm: Any) -> None:
    x = torch.ones(100, device=comm.device)
    work = comm.all_reduce_begin(torch.zeros_like(x), x)
    with refused(ArgumentError, "split all_reduce", "wait()"):
        comm.all_reduce(x, x)
    same(set(work.wait().tolist()), {float(comm.size)}, "the split one")
    graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    work, stray = comm.all_reduce_begin(torch.zeros_like(x), x), torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(stray, capture_error_mode="thread_local"),
        refused(ArgumentError, "in no graph", "wait() where it began"),
    ):
        x.add_(0)
        work.wait()
    same(set(work.wait().tolist()), {float(comm.size)}, "where it began")

    def fails() -> None:
        comm.all_reduce_begin(out, x)
        if stream_captures():  # torch's own question is answered as in eager calls
            raise ValueError("between the halves")

    def forgets() -> torch.Tensor:
        comm.all_reduce_begin(out, x)
        return x * 2

    with refused(GraphError, "between the halves"):
        commlib.graph.capture(fails)()
    forgetful = commlib.graph.capture(forgets)
    for turn in range(3):
        x.fill_(turn)
        close(forgetful(), x * 2, "a half that nobody waits for")
        same(set(out.tolist()), {float(comm.size * turn)}, "ended all the same")
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        half = comm.all_reduce_begin(out, x)
        y = x * 2
        half.wait()
    for turn in range(3):
        x.fill_(turn)
        graph.replay()
        same(set(out.tolist()), {float(comm.size * turn)}, "captured")
        same(set(y.tolist()), {2.0 * turn}, "between")


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
        close(fast(x).clone(), doubled(x), f"{items} items")
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
        close(y, doubled(x), "captured")


def test_compiled(unified_ranks: Ranks) -> None:
    generating(unified_ranks)(compiled, "default", deadline=240)


def test_compiled_with_graphs(gpu_ranks: Ranks) -> None:
    generating(gpu_ranks)(compiled, "reduce-overhead", deadline=240)


def test_compiled_and_captured(gpu_ranks: Ranks) -> None:
    generating(gpu_ranks)(compiled_and_captured, deadline=240)


def answers(comm: Any) -> list[str]:
    return [comm.explain(n, d) for n in (4, 10**5, 10**10) for d in (torch.bfloat16, torch.int32)]


@runs_on("unified_ranks")
def test_explain(comm: Any) -> None:
    """Says what runs, the same on every rank."""
    told = answers(comm)
    same(len({tuple(row) for row in comm.exchange([zlib.crc32("".join(told).encode())])}), 1, told)
    same(comm.explain(0, torch.float32), "nothing is sent: no bytes", "no bytes")
    for wrong in (3, -2):
        with refused(ArgumentError, f"nbytes={wrong}", "multiple of 2"):
            comm.explain(wrong, torch.bfloat16)
    with another(comm, 88) as ring:
        ring.abort()
        same("aborted" in ring.explain(4, torch.float32), True, "of a ring that has ended")
    same("float64" in comm.explain(8, torch.float64), True, "a dtype without a kernel")


@runs_on("cpu_ranks")
def test_explain_on_a_cpu(comm: Any) -> None:
    same({text.split(":")[0] for text in answers(comm)}, {comm.engine})


@runs_on("gpu_ranks")
def test_explain_on_a_gpu(comm: Any) -> None:
    """Says which sizes push kernels take, and the flag turns all of it off."""
    heads = ["one_shot", "NCCL:", "one_shot", "NCCL:", "NCCL:", "NCCL:"]
    same([text.split()[0] for text in answers(comm)], heads)
    with (
        commlib.flags.override("FLAGS_custom_allreduce", comm.rank == 0),
        another(comm, 85) as ring,
    ):
        same("FLAGS_custom_allreduce" in ring.explain(64, torch.float32), True, "explained")
        x = torch.ones(9, device=comm.device)
        same(set(ring.all_reduce(x, x).tolist()), {float(comm.size)}, "by NCCL")
        same("FLAGS_" in ring.explain(4, torch.float32, "premul_sum"), True, "of a scaled sum")
        same(ring.all_reduce_begin(x, x).wait().unique().tolist(), [comm.size**2], "begun")


@runs_on("gpu_ranks")
def test_ranks_that_push_kernels_can_t_serve(comm: Any) -> None:
    """A rank with another table, or whose memory its peers can't prove, leaves all of them NCCL."""
    text, proof = kernel_table.text, peer_memory.PROOF
    here, x = comm.rank == 0, torch.ones(9, device=comm.device)
    try:
        if here:
            kernel_table.text = lambda: text() + "\n"  # type: ignore[assignment]
        with another(comm, 89) as ring:
            same("different tables or kernels" in ring.explain(64, torch.float32), True, "table")
            same(set(ring.all_reduce(x, x * 1).tolist()), {float(comm.size)}, "by NCCL")
        kernel_table.text = text
        if here:
            peer_memory.PROOF = proof.with_name("missing.cu")
        with another(comm, 89) as ring:
            same("no peer access" in ring.explain(64, torch.float32), True, "proof")
            same(set(ring.all_reduce(x, torch.ones_like(x)).tolist()), {float(comm.size)}, "NCCL")
    finally:
        kernel_table.text, peer_memory.PROOF = text, proof
