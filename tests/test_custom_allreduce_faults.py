"""The push kernels when a peer is late, lost or can't compile, and after a reset."""

import contextlib
import gc
import os
import signal
from typing import Any

import pytest
import torch

import commlib
import commlib.graph
from commlib.errors import (
    CommTimeout,
    EngineError,
    PeerTimeout,
    RingError,
)
from commlib.p2p import push_channel, push_collectives
from tests.support.checks import assert_equal, on_gpu, raises, settle
from tests.support.launchers import on_gpus
from tests.support.processes import run
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on
from tests.test_custom_allreduce import another
from tests.test_custom_allreduce_graphs import captured

LATE_S = 5.0  # a ring must be created within it, on a busy machine too


@runs_on("gpu_ranks")
def test_a_rank_that_cannot_compile(comm: Any) -> None:
    """Where one rank can't compile the kernels, all ranks use NCCL, and say why."""
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank:
            patch.setattr(push_collectives, "FILES", ("missing.cu",))
        with another(comm, 89) as ring:
            assert_equal("can't compile" in ring.explain(1024, torch.bfloat16), True, "explain")
            x = torch.ones(8, device=comm.device)
            assert_equal(set(ring.all_reduce(x, x).tolist()), {float(comm.size)}, "sum")


def recorded(ring: Any, collective: str, items: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a graph of a collective, its input and its output, with parts of ``items``."""
    if collective == "all_reduce":
        return captured(ring, items)  # which has several calls
    full = torch.zeros(ring.size * items, dtype=torch.bfloat16, device=ring.device)
    x = torch.zeros_like(full[:items] if collective == "all_gather" else full)
    out = torch.zeros_like(full[:items] if collective == "reduce_scatter" else full)
    getattr(ring, collective)(out, x)
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # a graph of another test that goes in a capture would end it
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        getattr(ring, collective)(out, x)
    return graph, x, out


def call_without_the_last_rank(
    ring: Any, how: str, collective: str, graph: Any, out: Any, x: Any
) -> None:
    """Call what the last rank does not: the results are NaN, and what follows moves nothing."""
    for _ in range(3):  # what follows the fault leaves at once
        if how == "eager":
            with contextlib.suppress(PeerTimeout, RingError):
                getattr(ring, collective)(out, x)
        else:
            graph.replay()
    torch.cuda.synchronize()
    assert_equal(bool(out.isnan().all()), True, "results are NaN")
    if how == "graph":
        gathered = torch.zeros(ring.size * 5, dtype=torch.int64, device=ring.device)
        fault, ring._engine._push._word.value = ring._engine._push._word.value, 0
        ring.all_gather(gathered, gathered[:5])  # launched all the same
        torch.cuda.synchronize()
        assert_equal(gathered.unique().tolist(), [-1], "what moved")
        assert_equal(ring._engine._push._word.value, fault, "the same fault")


def late(comm: Any, how: str, collective: str) -> None:
    """A peer that does not come is named on every rank; reset() repairs, graphs stay valid."""
    last = comm.rank == comm.size - 1
    with another(comm, 83, timeout=LATE_S) as ring:
        items = 300_000 if how == "large graph" else 1000
        graph, x, out = recorded(ring, collective, items)
        torch.cuda.synchronize()
        ring.exchange([])
        if not last:
            call_without_the_last_rank(ring, how, collective, graph, out, x)
        comm.exchange([])
        if last and how != "eager":
            graph.replay()  # too late
        if last and how == "eager":
            with contextlib.suppress(PeerTimeout):
                getattr(ring, collective)(out, x)
        torch.cuda.synchronize()
        words = (f"waiting for rank {comm.size - 1}", collective, "(call", f"{LATE_S:g} s")
        seen = ring._health.fault is not None
        with raises(RingError if seen else PeerTimeout, *(("reset()",) if seen else words)):
            ring.check()
        assert_equal(
            any(words[0] in text for text in ring._errors()), True, f"errors {ring._errors()}"
        )
        ring.reset()
        summed = comm.size if "reduce" in collective else 1
        for turn in range(3):
            x.fill_(turn + 1)
            graph.replay()
            assert_equal(set(out.tolist()), {summed * (turn + 1.0)}, "replay after reset")
            getattr(ring, collective)(out, x)
            assert_equal(set(out.tolist()), {summed * (turn + 1.0)}, "call after reset")
        torch.cuda.synchronize()
        ring.check()


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_peer_that_does_not_come(gpu_ranks: Ranks, how: str, collective: str) -> None:
    gpu_ranks(late, how, collective)


@runs_on("gpu_ranks")
def test_a_peer_that_does_not_come_to_a_large_call(comm: Any) -> None:
    late(comm, "large graph", "all_reduce")


@runs_on("gpu_ranks")
def test_calls_of_nccl_after_a_lost_peer(comm: Any) -> None:
    """Calls of NCCL that wait after the fault for that peer end too: reset() connects again."""
    with another(comm, 87, timeout=30) as ring:
        ring.connect()  # which may take longer than the deadline of the kernels
        limit = int(LATE_S * 1e9).to_bytes(8, "little")
        ring._engine._push._memory.put(push_channel._LIMIT, limit)
        x, ints = torch.ones(1000, device=comm.device), torch.ones(9, device=comm.device).long()
        held = commlib.graph.capture(lambda x: ring.all_reduce(torch.empty_like(x), x) + 1)
        for src in (x, ints):
            assert_equal(set(held(src).tolist()), {comm.size + 1.0}, "captured")
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
        for src in (x, ints):
            assert_equal(set(held(src).tolist()), {comm.size + 1.0}, "captured again")
            assert_equal(set(ring.all_reduce(torch.empty_like(src), src).tolist()), {comm.size},
                 "after reset")  # fmt: skip
        ring.barrier()
        torch.cuda.synchronize()
        ring.check()


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_peer_that_does_not_come_of_more(many_gpu_ranks: Ranks, collective: str) -> None:
    many_gpu_ranks(late, "graph", collective)


@runs_on("unified_ranks", lost=frozenset([1]), deadline=90)
def test_a_killed_peer(comm: Any) -> None:
    """A peer whose process is gone is named within the deadline; the ring can't be repaired."""
    seconds = 15 if on_gpu(comm) else LATE_S  # NCCL must connect within it
    ring = commlib.new_ring(86, range(comm.size), timeout=seconds)
    assert ring is not None
    x = torch.ones(1000, device=comm.device)
    ring.all_reduce(x, x)
    ring.barrier()
    settle(comm)
    comm.exchange([])  # the barrier of the other rank has ended too
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises((PeerTimeout, RingError, CommTimeout, EngineError)):
        ring.all_reduce(x, x)
        settle(comm)
        ring.check()
    if on_gpu(comm):
        assert_equal("waiting for rank 1 in all_reduce" in ring._errors()[0], True, ring._errors())
        assert_equal(bool(x.isnan().all()), True, "results are NaN")
        assert_equal(float(torch.ones(5, device=comm.device).sum()), 5.0, "the device still works")
        with raises((CommTimeout, EngineError), "exchange"):
            ring.reset()
    commlib.shutdown(abort=True)


@pytest.mark.gpu
@pytest.mark.parametrize("allocator", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_allocators(allocator: str) -> None:
    """User memory is never shared, so no setting of torch's allocator matters."""
    code, out, err = run(
        *on_gpus("tests/programs/allocators.py"),
        fresh=True,  # torch reads the setting while it is loaded
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
        assert_equal(set(ring.all_reduce(x, x).tolist()), {float(comm.size)}, "after reset")
    with raises(RingError, "aborted"):
        ring.check()
    with raises(RingError, "aborted"):
        ring.reset()
