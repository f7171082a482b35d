"""Calls of the CUDA driver and of torch's allocator that a capture needs."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from commlib.errors import GraphError


@contextmanager
def no_stale_streams() -> Iterator[None]:
    """Let autograd nodes that an eager forward made go on in the capture, where torch can."""
    override = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
    if override is not None:
        override(True)
    try:
        yield
    finally:
        if override is not None:
            override(False)


@contextmanager
def unsafe_calls() -> Iterator[None]:
    """Allow this thread what no capture holds, such as an allocation, inside a ``with`` block."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    status, before = driver.cuThreadExchangeStreamCaptureMode(mode)
    if int(status) != 0:
        raise GraphError(f"cuThreadExchangeStreamCaptureMode: {status}")
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Return how many nodes a graph has."""
    from cuda.bindings import driver

    status, _, count = driver.cuGraphGetNodes(graph.raw_cuda_graph(), 0)[:3]
    if int(status) != 0:
        raise GraphError(f"cuGraphGetNodes: {status}")
    return int(count)


def clear_error() -> None:
    """Take the last error from the runtime library that torch uses; it is not a lasting one."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in sorted({line.split()[-1] for line in maps if "libcudart.so" in line}):
        ctypes.CDLL(path).cudaGetLastError()
