"""A Work and CUDA graph captures: one that is dropped, waited for or kept across them."""

from typing import Any

import torch

from commlib import deferred, ops
from commlib.errors import ArgumentError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

ASYNC: Any = {"use_calc_stream": False, "sync_op": False}


def _stream() -> torch.cuda.Stream:
    """Return a stream that waits for what the current one holds: the inputs of the test."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def _captured(stream: torch.cuda.Stream, body: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    return graph


def dropped(comm: Any) -> None:
    """A Work from before a capture that is dropped in it leaves the capture alone."""
    x = torch.ones(1 << 16, device=comm.device)
    stream, out = _stream(), torch.empty(comm.size << 16, device=comm.device)
    held: dict[str, Any] = {}
    with torch.cuda.stream(stream):
        held["work"] = ops.all_gather(x, **ASYNC)
    torch.cuda.synchronize()

    def body() -> None:
        held["work"] = ops.all_gather(x, **ASYNC)  # drops the one before
        out.copy_(held["work"].wait() * 2)

    graph = _captured(stream, body)
    assert_equal(len(deferred.kept), 1, "tensors kept alive")
    graph.replay()
    torch.cuda.synchronize()
    assert_bits_equal(out, torch.full_like(out, 2.0), "the replay")
    held.clear()  # a Work of a capture that is over
    ops.all_gather(x, **ASYNC).wait()
    assert_equal(len(deferred.kept), 0, "tensors kept alive after the next call")
    graph.replay()
    torch.cuda.synchronize()
    assert_bits_equal(out, torch.full_like(out, 2.0), "the replay after it")
    assert_equal(comm.report()["state"], "ready", "the ring")


def test_dropped(gpu_ranks: Ranks) -> None:
    gpu_ranks(dropped)


@runs_on("gpu_ranks")
def test_dropped_inside(comm: Any) -> None:
    """A Work of the capture itself that nobody waits for is joined: the capture ends well."""
    x = torch.ones(1000, device=comm.device)
    stream, out = _stream(), torch.empty_like(x)
    ops.all_reduce(x)  # what the first call sets up

    def body() -> None:
        ops.all_reduce(x, out=out, **ASYNC)

    graph = _captured(stream, body)
    graph.replay()
    torch.cuda.synchronize()
    assert_bits_equal(out, torch.full_like(out, float(comm.size)), "the replay")


@runs_on("gpu_ranks")
def test_waited(comm: Any) -> None:
    """wait() in a capture for a call before it is refused, and the capture goes on."""
    x = torch.ones(1000, device=comm.device)
    stream, out = _stream(), torch.empty_like(x)
    with torch.cuda.stream(stream):
        work = ops.all_reduce(x, **ASYNC)
    torch.cuda.synchronize()

    def body() -> None:
        with raises(ArgumentError, "before the capture begins"):
            work.wait()
        out.copy_(x * 3)

    graph = _captured(stream, body)
    graph.replay()
    assert_bits_equal(
        work.wait(), torch.full_like(x, float(comm.size)), "the Work after the capture"
    )
    torch.cuda.synchronize()
    assert_bits_equal(out, torch.full_like(x, 3.0), "the replay")


def test_dropped_without_the_flag(legacy_gpu_ranks: Ranks) -> None:
    legacy_gpu_ranks(dropped)
