"""What a user sees of a ring, of the package and of their objects: names, copies, reprs, logs."""

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import commlib
from commlib import flags, graph, ops
from commlib.errors import ArgumentError, CommTimeout, RingError, ShapeError
from tests.support.checks import assert_bits_equal, assert_equal, raises, settle
from tests.support.runs_on import runs_on

RING = [
    "abort",
    "all_gather",
    "all_gather_object",
    "all_gather_v",
    "all_reduce",
    "all_reduce_begin",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "check",
    "close",
    "connect",
    "device",
    "engine",
    "exchange",
    "explain",
    "gather",
    "gather_object",
    "group",
    "monitored_barrier",
    "name",
    "nccl_comm",
    "process_group",
    "rank",
    "ranks",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_v",
    "report",
    "reset",
    "resume",
    "ring_id",
    "scatter",
    "scatter_object",
    "send",
    "size",
    "split",
    "stream",
    "stream_for",
    "suspend",
    "timeout",
]


def public(x: object) -> list[str]:
    """List the names that tab completion shows first."""
    return [name for name in dir(x) if not name.startswith("_")]


@runs_on("ranks")
def test_public_names(comm: Any) -> None:
    assert_equal(public(comm), RING, "names of a ring")
    assert_equal(sorted(comm.report()), sorted({*comm.report()}), "keys")
    for module in (graph, flags):
        assert_equal(dir(module), module.__all__, f"names of {module.__name__}")
    assert_equal("compat" in dir(commlib) and "graph" in dir(commlib), True, "names of the package")
    assert_equal(
        [name for name in dir(commlib) if name in ("Any", "core", "import_module")], [], "others"
    )


@runs_on("ranks")
def test_copies(comm: Any) -> None:
    """A copy of a ring is the ring."""
    assert_equal(copy.deepcopy({"ring": comm})["ring"] is comm, True, "deepcopy")
    assert_equal(copy.copy(comm) is comm, True, "copy")
    assert_equal(pickle.loads(pickle.dumps(comm)) is comm, True, "pickle")


@runs_on("ranks")
def test_names(comm: Any) -> None:
    """A name finds the ring, is in its errors, and belongs to one ring at a time."""
    ring = commlib.new_ring(81, range(comm.size), name="tensor parallel")
    assert ring is not None
    assert_equal(
        (ring.name, commlib.comm("tensor parallel") is ring), ("tensor parallel", True), "name"
    )
    assert_equal(commlib.comm(ring) is ring, True, "a ring itself")
    x = torch.ones(3, device=comm.device)
    assert_bits_equal(
        ops.all_reduce(x, "tensor parallel"), torch.full((3,), 2.0), "an operator, by name"
    )
    assert_bits_equal(ops.all_reduce(x, ring), torch.full((3,), 2.0), "an operator, by ring")
    with raises(ShapeError, "all_gather on ring 81 'tensor parallel' (rank"):
        ring.all_gather(x, x)
    with raises(RingError, "the name 'tensor parallel' belongs to ring 81", "close_ring(81)"):
        commlib.new_ring(82, [comm.rank], name="tensor parallel")
    with raises(ArgumentError, "name=7"):
        commlib.new_ring(82, [comm.rank], name=7)
    with raises(RingError, "'pipeline'", "rings here"):
        commlib.comm("pipeline")
    ring.close()
    assert_equal(commlib.CommContextManager.instance().rings(), [0], "after close()")
    with raises(RingError, "closed"):
        commlib.comm(ring)
    commlib.close_ring(81)


@runs_on("ranks")
def test_new_tensors(comm: Any) -> None:
    """With one tensor, all_reduce, all_gather and reduce_scatter return a new one."""
    x = torch.arange(4.0, device=comm.device).reshape(4, 1) + comm.rank
    assert_bits_equal(
        comm.all_reduce(x), sum(torch.arange(4.0).reshape(4, 1) + r for r in range(comm.size))
    )
    assert_bits_equal(x, torch.arange(4.0).reshape(4, 1) + comm.rank, "the input")
    assert_bits_equal(
        comm.all_gather(x), torch.cat([torch.arange(4.0) + r for r in range(2)]).reshape(8, 1)
    )
    mine = slice(2 * comm.rank, 2 * comm.rank + 2)
    total = sum(torch.arange(4.0).reshape(4, 1) + r for r in range(2))
    assert_bits_equal(comm.reduce_scatter(x), total[mine])  # type: ignore[index]
    with raises(ShapeError, "dim 0 of shape (3,) does not divide"):
        comm.reduce_scatter(x[:3, 0].contiguous())


@runs_on("ranks")
def test_reprs(comm: Any) -> None:
    assert_equal(repr(comm)[:39], f"<CommContext ring 0: rank {comm.rank} of 2 [0, 1]", "a ring")
    assert_equal(
        repr(commlib.CommContextManager.instance()), "<CommContextManager of rings [0]>", "manager"
    )
    x = torch.ones(3, device=comm.device)
    work = comm.all_reduce(x, x, use_calc_stream=False, sync_op=False)
    work.wait()
    settle(comm)
    assert_equal(repr(work)[:29], "<Work of torch.float32 [3], f", "a work")


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Yield a list that gets the text of every line that is logged in the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("commlib")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


@runs_on("ranks")
def test_logged(comm: Any) -> None:
    """One line per ring created and closed."""
    with log_lines() as lines:
        commlib.new_ring(83, range(comm.size))
        commlib.close_ring(83)
    assert_equal(sum("created <CommContext ring 83" in line for line in lines), 1, str(lines))
    assert_equal(sum("close on ring 83" in line for line in lines), 1, str(lines))


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "recv"])
@runs_on("cpu_ranks")
def test_a_timeout_is_logged(comm: Any, name: str) -> None:
    """One line per ring that times out, whatever the engine raises."""
    ring, x = commlib.new_ring(84, range(comm.size)), torch.ones(3)
    assert ring is not None
    late: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: ring.all_reduce(x, timeout=1),
        "barrier": lambda: ring.barrier(timeout=1),
        "recv": lambda: ring.recv(x, peer=1, timeout=1),
    }
    with log_lines() as lines:
        if ring.rank == 0:
            with raises(CommTimeout, f"{name} on ring 84"):
                late[name]()
            with raises(RingError, "ring 84"):
                ring.barrier()
        comm.barrier()
        commlib.close_ring(84, abort=True)
    expected = [f"{name} on ring 84 (rank 0 of 2, {ring.engine}): timed out"]
    timeouts = [line for line in lines if "timed out" in line]
    assert_equal(timeouts, expected if ring.rank == 0 else [], "the log")


@runs_on("cpu_ranks")
def test_a_late_rank_at_a_monitored_barrier_is_logged(comm: Any) -> None:
    """One line per barrier that times out: the ring stays usable."""
    with log_lines() as lines:
        for _ in range(2 * (comm.rank == 0)):
            with raises(CommTimeout, "monitored_barrier on ring 0", "waiting for rank 1"):
                comm.monitored_barrier(timeout=0.2)
        comm.barrier()
    expected = [f"monitored_barrier on ring 0 (rank 0 of 2, {comm.engine}): timed out"]
    timeouts = [line for line in lines if "timed out" in line]
    assert_equal(timeouts, expected * 2 if comm.rank == 0 else [], "the log")
    comm.monitored_barrier()


@pytest.mark.parametrize("name", ["close_ring", "comm", "init", "new_ring", "shutdown"])
def test_functions_have_sections(name: str) -> None:
    text = getattr(commlib, name).__doc__
    assert name in ("shutdown",) or "Raises:" in text or "Args:" in text
