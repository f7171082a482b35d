"""Automatic collections of garbage wait while graphs are made, and go on afterwards."""

import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.python.garbage import no_collection


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    """Collections are on, as in most programs."""
    before = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if before else gc.disable)()


def test_a_first_call() -> None:
    seen = []

    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(gc.isenabled())
        return x * 2

    captured = graph.capture(double, on_fail="eager")

    captured(torch.ones(2))

    assert not any(seen)
    assert gc.isenabled()


def test_a_first_call_that_fails() -> None:
    def read(x: torch.Tensor) -> float:
        return x.sum().item()

    with pytest.raises(GraphError):
        graph.capture(read)(torch.ones(2))

    assert gc.isenabled()


def test_a_program_that_never_collects() -> None:
    gc.disable()

    with no_collection():
        pass

    assert not gc.isenabled()


def test_the_last_of_two_threads_lets_python_collect() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with no_collection():
            entered.set()
            assert leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(20)
    with no_collection():
        pass
    during = gc.isenabled()
    leave.set()
    thread.join(20)

    assert not during
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_collects() -> None:
    with no_collection():
        child = os.fork()
        if child == 0:
            collects = gc.isenabled()
            with no_collection():
                pass
            os._exit(0 if collects and gc.isenabled() else 1)
        _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
