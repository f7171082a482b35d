"""Streams, rings and compute that share a GPU, and what a ring takes of it: on GPUs only."""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import commlib
import commlib.graph
from commlib import flags, ops
from commlib.compat import paddle
from commlib.errors import ArgumentError, PeerTimeout, RingError, StreamError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.ranks import NewRanks
from tests.support.runs_on import runs_on

Call = Callable[[], Any]
MIB = 1 << 20
LATE_S = 5.0


def new_ring(ring_id: int, timeout: float | None = None) -> Any:
    return commlib.new_ring(ring_id, [0, 1], timeout=timeout)


def has_context(gpu: int) -> bool:
    cuda: Any = torch._C
    return bool(cuda._cuda_hasPrimaryContext(gpu))


def graph_of(stream: torch.cuda.Stream, call: Any, times: int = 1) -> torch.cuda.CUDAGraph:
    """Capture calls by hand, on a stream."""
    call()
    torch.cuda.synchronize()
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(times):
            call()
    return cuda_graph


def ones(comm: Any, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes // 2,), comm.rank + 1.0, dtype=torch.bfloat16, device=comm.device)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("nbytes", [64 << 10, MIB, 16 * MIB, 64 * MIB])
@runs_on("gpu_ranks")
def test_graphs_of_rings_on_streams(comm: Any, nbytes: int, count: int) -> None:
    """Graphs of rings on a stream each, whose first one is another ring's on each rank."""
    rings = [new_ring(131 + i, timeout=LATE_S) for i in range(count)]
    streams = [torch.cuda.Stream() for _ in rings]
    x = ones(comm, nbytes)
    outs = [torch.zeros_like(x) for _ in rings]
    graphs = [
        graph_of(stream, lambda ring=ring, out=out: ring.all_reduce(out, x), 4)
        for ring, out, stream in zip(rings, outs, streams, strict=True)
    ]
    for turn in range(3):
        for out in outs:
            out.zero_()
        torch.cuda.synchronize()
        comm.exchange([])
        for i, (graph, stream) in enumerate(zip(graphs, streams, strict=True)):
            with torch.cuda.stream(stream):
                if i != (comm.rank + turn) % count:
                    torch.cuda._sleep(50_000_000)
                graph.replay()
        torch.cuda.synchronize()
        for ring, out in zip(rings, outs, strict=True):
            ring.check()
            assert_bits_equal(out, torch.full_like(out, 3.0), f"{nbytes} bytes")
    del graphs


@pytest.mark.parametrize("nbytes", [MIB, 16 * MIB, 64 * MIB])
@runs_on("gpu_ranks")
def test_two_streams_of_one_ring(comm: Any, nbytes: int) -> None:
    """Graphs of one ring side by side: right, or ``StreamError``; nothing else."""
    ring = new_ring(33, timeout=LATE_S)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [ones(comm, nbytes), ones(comm, nbytes) * 10]
    outs = [torch.zeros_like(x) for x in inputs]
    graphs = [
        graph_of(stream, lambda x=x, out=out: ring.all_reduce(out, x))
        for x, out, stream in zip(inputs, outs, streams, strict=True)
    ]
    reported = 0
    for _ in range(30):
        torch.cuda.synchronize()
        comm.exchange([])
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        raised = 0
        try:
            ring.check()
        except StreamError:
            raised = 1
        if max(row[0] for row in comm.exchange([raised])):
            reported += 1
            ring.reset()
            continue
        for out, want in zip(outs, (3.0, 30.0), strict=True):
            assert_bits_equal(out, torch.full_like(out, want), f"{nbytes} bytes, nothing reported")
    if nbytes >= 16 * MIB:
        assert_equal(reported > 0, True, f"{nbytes} bytes: StreamError")
    del graphs


@runs_on("gpu_ranks")
def test_a_stream_that_is_destroyed(comm: Any) -> None:
    """The stream of the last call, of another library, is gone at the next one."""
    from cupy.cuda import runtime

    x = torch.full((1024,), comm.rank + 1.0, device=comm.device)
    for turn in range(3):
        handle = runtime.streamCreateWithFlags(1)
        stream = torch.cuda.ExternalStream(handle, device=comm.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            first = ops.all_reduce(x)
            work = ops.all_gather(x, use_calc_stream=False, sync_op=False)
            begun = comm.all_reduce_begin(torch.empty_like(x), x)
        stream.synchronize()
        runtime.streamDestroy(handle)
        assert_bits_equal(begun.wait(), torch.full_like(x, 3.0), f"turn {turn}, begun there")
        work.wait()
        assert_bits_equal(ops.all_reduce(x), torch.full_like(x, 3.0), f"turn {turn}")
        assert_bits_equal(first, torch.full_like(x, 3.0), f"turn {turn}, on the stream")


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@runs_on("gpu_ranks")
def test_results_of_raw_calls(comm: Any, dtype: torch.dtype) -> None:
    """Memory that queued kernels of the calc stream still write is not a raw call's result."""
    count = MIB
    x = torch.full((count,), comm.rank + 1, dtype=dtype, device=comm.device)
    three = torch.full_like(x, 3)

    def received() -> torch.Tensor | None:
        if comm.rank:
            return paddle.recv_v2([count], dtype, peer=0)
        paddle.send_v2(three, peer=1)
        return None

    calls: list[Call] = [
        lambda: paddle.c_allreduce_sum(x),
        lambda: paddle.c_broadcast(three, root=0),
        received,
    ]
    for number, call in enumerate(calls):
        for _ in range(2):
            torch.cuda.synchronize()
            comm.exchange([])
            paddle.c_wait_compute(x)
            torch.cuda._sleep(100_000_000)
            temporary = torch.full((count,), 77, dtype=dtype, device=comm.device)
            double = temporary * 2
            del temporary
            y = call()
            paddle.c_wait_comm(y)
            torch.cuda.synchronize()
            if y is not None:
                assert_bits_equal(y, torch.full_like(y, 3), f"call {number} of {dtype}")
            assert_bits_equal(double, torch.full_like(double, 154), "the program's own")


@pytest.mark.parametrize("nbytes", [256 << 10, 16 * MIB, 64 * MIB])
@runs_on("gpu_ranks")
def test_compute_while_a_peer_is_late(comm: Any, nbytes: int) -> None:
    """Kernels that fill the GPU end while an asynchronous call still waits for its peer."""
    ring = new_ring(34)
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=comm.device)
    x = ones(comm, nbytes)
    torch.mm(a, a)  # its kernel is loaded now: loading waits for kernels that run
    for share in ({}, {"max_blocks": 4}):
        begin = functools.partial(
            ring.all_reduce, x=x, use_calc_stream=False, sync_op=False, **share
        )
        out = torch.zeros_like(x)
        torch.cuda.synchronize()
        comm.exchange([])
        work: Any = begin(out) if comm.rank == 0 else None
        if comm.rank == 0:
            for _ in range(10):
                torch.mm(a, a)
            torch.cuda.current_stream().synchronize()  # up to the ring's deadline, if it can't
            assert_equal(work.done(), False, "the call, whose peer has not come")
        comm.exchange([])
        work = work or begin(out)
        assert_bits_equal(work.wait(), torch.full_like(out, 3.0), f"{nbytes} bytes")
    with raises(ArgumentError, "max_blocks", "rank"):
        ring.all_reduce(x, x, max_blocks=0)


@runs_on("gpu_ranks")
def test_a_ring_does_not_wait_for_another_ones_bucket(comm: Any) -> None:
    """A tensor-parallel ring works while a data-parallel bucket waits for a late peer."""
    buckets, layers = new_ring(36), new_ring(37)
    bucket, x = ones(comm, 16 * MIB), ones(comm, MIB // 16)
    out = torch.zeros_like(x)
    layers.all_reduce(out, x)  # what a first call makes is there
    torch.cuda.synchronize()
    comm.exchange([])
    begin = functools.partial(
        buckets.all_reduce, bucket, bucket, use_calc_stream=False, sync_op=False
    )
    work: Any = begin() if comm.rank == 0 else None
    for _ in range(4):
        layers.all_reduce(out, x)
    torch.cuda.current_stream().synchronize()  # up to the ring's deadline, if it waits
    if comm.rank == 0:
        assert_equal(work.done(), False, "the bucket, whose peer has not come")
    comm.exchange([])
    work = work or begin()
    assert_bits_equal(work.wait(), torch.full_like(bucket, 3.0), "the bucket")
    assert_bits_equal(out, torch.full_like(out, 3.0), "the other ring's sum")


@runs_on("gpu_ranks")
def test_a_peer_that_never_comes_to_an_asynchronous_call(comm: Any) -> None:
    """A peer that never comes is named by the gate too."""
    ring = new_ring(35, timeout=5)
    x = ones(comm, 16 * MIB)
    if comm.rank == 0:
        ring.all_reduce(x, x, use_calc_stream=False, sync_op=False).wait()
        torch.cuda.synchronize()
        assert_equal(bool(x.isnan().all()), True, "no number is left")
        with raises(PeerTimeout, "rank 1", "all_reduce"):
            ring.check()
    comm.exchange([])
    commlib.CommContextManager.instance().close(35, abort=True)


@pytest.mark.two_gpus
@runs_on("gpu_ranks")
def test_no_context_on_another_gpu(comm: Any) -> None:
    """Steps in their own threads leave no context on GPU 0."""
    other = 1 - comm.rank
    before = has_context(other)
    manager = commlib.CommContextManager.instance()
    x = torch.ones(4096, dtype=torch.int64, device=comm.device)
    for abort in (False, True):
        ring = new_ring(36)
        ring.all_reduce(x, x)
        torch.cuda.synchronize()
        comm.exchange([])
        manager.close(36, abort=abort)
    comm.reset()
    assert_equal(has_context(other), before, "a context on the other GPU")


@runs_on("gpu_ranks")
def test_communicators_on_demand(comm: Any) -> None:
    """No NCCL communicator before a call needs one; in a capture it is refused by name."""
    ring = new_ring(37)
    small = torch.ones(1024, device=comm.device)
    buffer = torch.ones(1024, dtype=torch.int64, device=comm.device)
    ring.all_reduce(small, small)
    row = next(r for r in commlib.CommContextManager.instance().report() if r["ring_id"] == 37)
    assert_equal((row["communicator"], row["bytes"]), (False, 0), "an idle ring")
    assert_equal(row["workspace_bytes"] > 0, True, "what it has taken")
    assert_equal("connect()" in ring.explain(4096, torch.int64), True, "announced")
    calls: list[Call] = [
        lambda: ring.all_reduce(buffer, buffer),
        lambda: ring.all_to_all(buffer, buffer, in_splits=[512] * 2, out_splits=[512] * 2),
    ]
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with (
            raises(ArgumentError, "connect()", "capture", "ring 37"),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            call()
        assert_equal(ring.report()["state"], "ready", "after a call that was refused")
    ring.connect()
    assert_equal(ring.report()["communicator"], True, "connected")
    assert_equal("connect()" in ring.explain(4096, torch.int64), False, "nothing to announce")
    target = torch.zeros_like(buffer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        ring.all_to_all(target, buffer, in_splits=[512] * 2, out_splits=[512] * 2)
        ring.all_reduce(target, target)
    graph.replay()
    torch.cuda.synchronize()
    assert_bits_equal(target, torch.full_like(target, 2), "captured after connect()")
    graph.reset()


@runs_on("gpu_ranks")
def test_first_calls_connect(comm: Any) -> None:
    """The runs before a capture of ours connect what it needs."""
    ring = new_ring(38)
    x = torch.arange(8, dtype=torch.int64, device=comm.device)
    f = commlib.graph.capture(lambda t: ops.all_reduce(t, 38) * 2, outputs="copy")
    for _ in range(3):
        assert_bits_equal(f(x), x * 4)
    assert_equal(ring.report()["communicator"], True, "connected by the runs before the capture")
    group = new_ring(39)
    sent, got = x.clone(), torch.zeros_like(x)
    with group.group():
        group.send(sent, peer=1 - comm.rank)
        group.recv(got, peer=1 - comm.rank)
        total = ops.all_reduce(x, 39)
    assert_bits_equal(got, x, "received in the first group")
    assert_bits_equal(total, x * 2, "reduced in the first group")


@runs_on("gpu_ranks")
def test_a_group_that_connects_is_launched_once(comm: Any) -> None:
    """The calls of a group that still has to connect are launched once."""
    with flags.override("FLAGS_custom_allreduce", False):
        ring = new_ring(52)
    x = torch.ones(8, device=comm.device)
    parts, out = torch.full((8,), comm.rank + 1.0, device=comm.device), torch.zeros_like(x)
    with ring.group():
        ring.all_reduce(x, x)
        ring.all_to_all(out, parts)
    assert_bits_equal(x, torch.full_like(x, 2.0), "the sum of a group that connected")
    assert_bits_equal(out, torch.tensor([1.0] * 4 + [2.0] * 4, device=comm.device), "the exchange")


@runs_on("gpu_ranks")
def test_closing_next_to_a_graph_of_the_program(comm: Any) -> None:
    """close() does not wait for graphs of the program; the communicator goes after them."""
    from commlib.engines.nccl import released

    ring = new_ring(40)
    x = torch.ones(MIB, dtype=torch.int64, device=comm.device)
    ring.connect()
    graph = graph_of(torch.cuda.Stream(), lambda: ring.all_reduce(x, x))
    torch.cuda.synchronize()
    comm.exchange([])
    began = time.monotonic()
    commlib.CommContextManager.instance().close(40)
    took = time.monotonic() - began
    assert_equal(took < flags.get(flags.CLOSE_TIMEOUT) / 2, True, f"close() took {took:.1f} s")
    assert_equal("still hold" in ring._errors()[-1], True, ring._errors())
    assert_equal(len(released._released), 1, "communicators that wait for graphs")
    graph.reset()
    torch.cuda.synchronize()
    end = time.monotonic() + 10
    while released._released and time.monotonic() < end:
        released.destroy_released()
        time.sleep(0.05)
    assert_equal(len(released._released), 0, "communicators after the graph")


@runs_on("gpu_ranks")
def test_suspend_and_resume(comm: Any) -> None:
    """Memory is given back, graphs stay valid, calls in between are refused."""
    ring = new_ring(41)
    x = torch.full((4096,), comm.rank + 1.0, device=comm.device)
    buffer = torch.ones(4096, dtype=torch.int64, device=comm.device)
    ring.all_reduce(buffer, buffer)
    f = commlib.graph.capture(lambda t: ops.all_reduce(t, 41) + 1, outputs="copy")
    assert_bits_equal(f(x), torch.full_like(x, 4.0))
    assert_equal(ring.report()["communicator"], True, "before")
    ring.suspend()
    assert_equal((ring.report()["communicator"], ring.report()["bytes"]), (False, 0), "given back")
    with raises(RingError, "resume()"):
        ring.all_reduce(x, x)
    with raises(RingError, "resume()"):
        ring.suspend()
    ring.resume()
    with raises(RingError, "not suspended"):
        ring.resume()
    assert_bits_equal(f(x), torch.full_like(x, 4.0), "a graph from before")
    buffer.fill_(1)
    ring.all_reduce(buffer, buffer)
    assert_bits_equal(buffer, torch.full_like(buffer, 2), "NCCL connected again")
    ring.suspend()
    commlib.CommContextManager.instance().close(41)


def lone_pairs(comm: Any) -> None:
    """A send and a receive that the other members of the ring do not know of."""
    with flags.override("FLAGS_custom_allreduce", False):
        device = f"cuda:{comm.rank % 2}"
        ring = commlib.CommContextManager.instance().create(42, range(4), device=device)
    assert ring is not None
    x = torch.full((1000,), float(comm.rank), device=device)
    for turn in range(2):
        if comm.rank % 2 == 0:
            ring.send(x + turn, peer=comm.rank + 1)
        else:
            assert_bits_equal(
                ring.recv(x, peer=comm.rank - 1), torch.full_like(x, comm.rank - 1.0 + turn)
            )
    torch.cuda.synchronize(device)
    assert_equal(ring.report()["communicator"], False, "the ring's own communicator")


def circle_of_pairs(comm: Any, ring_id: int, nbytes: int) -> None:
    """The first group of a ring is a circle of sends and receives."""
    with flags.override("FLAGS_custom_allreduce", False):
        device = f"cuda:{comm.rank % 2}"
        ring = commlib.CommContextManager.instance().create(
            ring_id, range(4), device=device, timeout=20
        )
    assert ring is not None
    after, before = (comm.rank + 1) % 4, (comm.rank - 1) % 4
    x = torch.full((nbytes,), comm.rank, dtype=torch.uint8, device=device)
    for _ in range(3):
        got = torch.full_like(x, 77)
        with ring.group():
            ring.send(x, peer=after)
            ring.recv(got, peer=before)
        torch.cuda.synchronize(device)
        assert_bits_equal(got, torch.full_like(x, before))


@pytest.mark.two_gpus
def test_pairs_in_a_larger_ring(new_cpu_ranks_with_gpus: NewRanks) -> None:
    with new_cpu_ranks_with_gpus(4) as ranks:
        ranks(lone_pairs, deadline=120)
        ranks(circle_of_pairs, 50, 4096, deadline=120)
        ranks(circle_of_pairs, 51, 64 * MIB, deadline=120)


@runs_on("legacy_gpu_ranks")
def test_first_call_in_a_capture(comm: Any) -> None:
    """With the flag off a first call in a capture is refused; the ring survives."""
    ring = new_ring(43)
    x = torch.ones(64, device=comm.device)
    out = torch.zeros_like(x)
    calls: list[Call] = [
        lambda: ring.all_reduce(out, x),
        lambda: ring.all_to_all(out, x),
        lambda: ring.send(x, peer=1) if comm.rank == 0 else ring.recv(out, peer=0),
    ]
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with (
            raises(ArgumentError, "capture", "ring 43"),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            call()
        assert_equal(ring.report()["state"], "ready", "after a call that was refused")
    ring.connect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        ring.all_reduce(out, x)
    graph.replay()
    torch.cuda.synchronize()
    assert_bits_equal(out, torch.full_like(out, 2.0), "captured after connect()")
    graph.reset()
