"""Garbage collection around the runs of a captured function."""

import gc
import os
import threading
from typing import Any

import torch

from commlib import graph
from commlib.graph.watching.garbage import collection, no_collection
from tests.support.checks import assert_equal
from tests.support.runs_on import runs_on


def test_it_waits() -> None:
    """It waits inside, goes on in an eager part, and is afterwards as it was before."""
    with no_collection():
        assert not gc.isenabled()
        with collection():
            assert gc.isenabled()
            with no_collection():  # a function that is captured inside the part
                assert not gc.isenabled()
        assert not gc.isenabled()
        with collection():
            assert gc.isenabled()
    assert gc.isenabled()


def test_it_is_off_already() -> None:
    """A program that has turned it off finds it off."""
    gc.disable()
    try:
        with no_collection(), collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_another_thread() -> None:
    """The eager part of another thread does not turn it on during a capture."""
    enabled: list[bool] = []

    def part() -> None:
        with collection():
            enabled.append(gc.isenabled())

    with no_collection():
        thread = threading.Thread(target=part)
        thread.start()
        thread.join(10)
        assert not gc.isenabled()
    assert enabled == [False]


@runs_on("gpu_ranks")
def test_runs_before_a_capture(comm: Any) -> None:
    """It is on in the call itself and in eager parts, and off in the runs before the capture."""
    (runs, to_runs), (parts, to_parts) = os.pipe(), os.pipe()  # lists and queues are refused

    @graph.eager
    def part(x: torch.Tensor) -> torch.Tensor:
        os.write(to_parts, b"%d" % gc.isenabled())
        return x

    def f(x: torch.Tensor) -> torch.Tensor:
        os.write(to_runs, b"%d" % gc.isenabled())
        return part(x * 2)

    captured = graph.capture(f, verify=False)
    captured(torch.ones(3, device=comm.device))
    for end in (to_runs, to_parts):
        os.close(end)
    assert_equal(os.read(runs, 9), b"100", "in the call, the run before the capture, the capture")
    assert_equal(os.read(parts, 9), b"111", "in eager parts")
    for end in (runs, parts):
        os.close(end)
    assert gc.isenabled()
