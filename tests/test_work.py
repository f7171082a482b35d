"""Work: what it means to wait, how often and from where, and what a missed deadline says."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import commlib
from commlib import ops
from commlib.errors import CommTimeout, RingError
from tests.support.checks import (
    assert_bits_equal,
    assert_equal,
    raises,
    sample,
    settle,
    until,
    wide,
)
from tests.support.formulas import total
from tests.support.ranks import NewRanks, Ranks
from tests.support.runs_on import runs_on

ASYNC: Any = {"use_calc_stream": False, "sync_op": False}


def _tell(comm: Any) -> None:
    """Let rank 1 go on after rank 0, on its own ring: ring 0 has a call under way."""
    side = commlib.new_ring(21, range(comm.size))
    assert side is not None
    side.barrier()
    commlib.CommContextManager.instance().close(21)


@runs_on("ranks")
def test_finished(comm: Any) -> None:
    """A Work of nothing is done; its result is what it was given."""
    x = torch.ones(3)
    work = commlib.Work(x)
    assert_equal(
        (work.done(), work.wait() is x, work.result is x), (True, True, True), "finished Work"
    )


@runs_on("ranks")
def test_many_threads(comm: Any) -> None:
    """Any number of threads may wait at once; every one sees the finished result."""
    every = [sample(rank, (100_001,), torch.float32) for rank in range(2)]
    want = torch.from_numpy(total([wide(x) for x in every], 0))
    if comm.rank == 1:
        time.sleep(0.2)  # so that the threads of rank 0 all wait
    out = torch.zeros(100_001, device=comm.device)
    work = ops.all_reduce(every[comm.rank].to(comm.device), out=out, **ASYNC)
    wrong: list[str] = []

    def wait() -> None:
        try:
            assert_equal(work.wait() is out, True, "result")
            seen = out.clone()
            settle(comm)
            assert_bits_equal(seen, want, "seen by a thread")
        except BaseException as error:  # a thread's error would be lost
            wrong.append(repr(error))

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert_equal(wrong, [], "errors of threads")
    assert_equal([thread.is_alive() for thread in threads], [False] * 8, "threads still waiting")


@runs_on("cpu_ranks")
def test_done_by_itself(comm: Any) -> None:
    """done() is False while the other rank has not come, and turns True without a wait()."""
    x = torch.full((5,), comm.rank + 1.0, device=comm.device)
    if comm.rank == 0:
        work = ops.all_reduce(x, **ASYNC)
        assert_equal(work.done(), False, "done() before the other rank comes")
    _tell(comm)
    if comm.rank == 1:
        work = ops.all_reduce(x, **ASYNC)
    until(work.done, "done() by itself")
    assert_bits_equal(work.result, torch.full((5,), 3.0), "result without wait()")
    assert_bits_equal(work.wait(), torch.full((5,), 3.0), "result")


@runs_on("ranks")
def test_order(comm: Any) -> None:
    """Waiting out of order, and not at all, changes no result and no later call."""
    xs = [torch.full((n,), comm.rank + n, device=comm.device) for n in range(1, 9)]
    works = [ops.all_reduce(x, **ASYNC) for x in xs]
    for n in (8, 2, 5):
        assert_bits_equal(works[n - 1].wait(), torch.full((n,), 2 * n + 1), f"work {n}")
    assert_bits_equal(ops.all_reduce(xs[2]), torch.full((3,), 7), "a call after unfinished ones")
    works.clear()
    assert_bits_equal(ops.all_reduce(xs[3]), torch.full((4,), 9), "a call after dropped ones")


def missed(comm: Any) -> None:
    """A call that the other rank never makes ends at the ring's deadline, the same at every wait.

    The ring is unusable then and says what to do; closed and created again it works, and no other
    ring has noticed.
    """
    manager = commlib.CommContextManager.instance()
    ring = commlib.new_ring(22, range(comm.size), timeout=4)
    assert ring is not None
    x = torch.ones(3)
    close_it = "call commlib.close_ring(22), then"
    new = "commlib.new_ring(22, [0, 1])"
    late = "while waiting for rank 1 (position 1 in the ring)"
    if comm.rank == 0:
        begin = time.monotonic()
        work = ops.all_reduce(x, 22, **ASYNC)
        for _ in range(2):
            with raises(CommTimeout, "ring 22", "did not finish within 4 s", late, close_it):
                work.wait()
        spent = time.monotonic() - begin
        if not 3 < spent < 20:
            raise AssertionError(f"waited {spent:.1f} s for a deadline of 4 s")
        with raises(RingError, "ring 22", close_it, new):
            ops.all_reduce(x, 22)
        assert_equal(len(ring._errors()) > 0, True, "errors() tells of it")
    comm.barrier()
    manager.close(22)
    again = commlib.new_ring(22, range(comm.size))
    assert again is not None
    assert_bits_equal(ops.all_reduce(x, 22), torch.full((3,), 2.0), "the ring created again")
    manager.close(22)


def missed_on_ring_0(comm: Any) -> None:
    """Ring 0 comes back as its error says, whichever rank has seen the failure."""
    commlib.shutdown()
    ring, x = commlib.init(timeout=5), torch.ones(3)
    if comm.rank == 0:
        with raises(CommTimeout, "did not finish within 5 s", "commlib.shutdown(), then"):
            ops.all_reduce(x)
        with raises(RingError, "ring 0", "call commlib.shutdown(), then commlib.init()"):
            ring.barrier()
    else:
        time.sleep(8)
    commlib.shutdown()
    commlib.init()
    assert_bits_equal(ops.all_reduce(x), torch.full((3,), 2.0), "ring 0 once more")


def test_missed_deadline(new_ranks: NewRanks) -> None:
    with new_ranks(2) as ranks:
        ranks(missed)
        ranks(missed_on_ring_0)


@runs_on("ranks")
def test_writes_are_known_to_autograd(comm: Any) -> None:
    """A write into ``out`` counts for autograd, and inference tensors are as good as others."""
    saved = torch.ones(3, device=comm.device)
    x = torch.ones(3, device=comm.device, requires_grad=True)
    product = x * saved
    for on_calc_stream in (True, False):
        before = saved._version
        ops.all_reduce(saved, op="max", out=saved, use_calc_stream=on_calc_stream)
        assert_equal(saved._version > before, True, f"after a write, {on_calc_stream=}")
    try:
        product.sum().backward()
    except RuntimeError as error:
        assert_equal("modified by an inplace operation" in str(error), True, str(error))
    else:
        raise AssertionError("a gradient was computed from overwritten values")
    with torch.inference_mode():
        y = torch.full((3,), 2.0, device=comm.device)
        assert_bits_equal(ops.all_reduce(y, out=y), [4.0] * 3, "in inference mode")
        assert_bits_equal(ops.all_gather(y), [4.0] * 6, "in inference mode")


@runs_on("ranks")
def test_waiting_in_another_mode(comm: Any) -> None:
    """Waiting in another grad or inference mode than the caller's changes nothing."""
    leaf = torch.full((4,), 2.0 * (comm.rank + 1), device=comm.device, requires_grad=True)
    with torch.no_grad():
        work = comm.all_reduce(leaf, leaf.detach(), op="avg", **ASYNC)
    work.wait()
    assert_bits_equal(leaf, [3.0] * 4, "a leaf, waited for with gradients on")
    with torch.inference_mode():
        strided = torch.zeros(4, 2, device=comm.device)[:, 0]
        ones = torch.ones(4, device=comm.device)
        work = comm.all_reduce(strided, ones, **ASYNC)
    assert_bits_equal(work.wait(), [2.0] * 4, "inference tensors, waited for outside")
    assert_equal(comm.report()["state"], "ready", "the ring afterwards")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def interrupted(comm: Any) -> None:
    """A wait that a signal ends is not a result: the next wait() waits again and gets it."""
    x, expected = torch.full((4, 3), comm.rank + 1.0), {"sum": 3.0, "avg": 1.5}
    peer = 1 - comm.rank
    starts: dict[str, tuple[Callable[[], commlib.Work], float]] = {
        **{
            op: (lambda op=op: ops.all_reduce(x, op=op, **ASYNC), want)
            for op, want in expected.items()
        },
        "strided": (lambda: comm.all_reduce(torch.zeros(3, 4).t(), x, op="avg", **ASYNC), 1.5),
        "recv": (lambda: comm.recv(torch.zeros(4, 3), peer=peer, **ASYNC), peer + 1.0),
        "group": (lambda: _crossing(comm, x, peer), peer + 1.0),
    }
    previous = signal.signal(signal.SIGALRM, _interrupt)
    for name, (start, want) in starts.items():
        if comm.rank == 0:
            work = start()
            for _ in range(2):
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                with raises(KeyboardInterrupt):
                    work.wait()
            assert_equal(
                comm.report()["state"], "ready", f"the ring after an interrupted wait, {name}"
            )
        comm.exchange([])
        if comm.rank == 1:
            work = comm.send(x, peer=peer, **ASYNC) if name == "recv" else start()
        for _ in range(2):
            work.wait()
        result = work.result[-1] if name == "group" else work.result
        if result is not None:
            assert_bits_equal(result, torch.full((4, 3), want), f"{name} after interruptions")
    signal.signal(signal.SIGALRM, previous)


def _crossing(comm: Any, x: torch.Tensor, peer: int) -> commlib.Work:
    work: commlib.Work
    with comm.group(**ASYNC) as work:
        comm.send(x, peer=peer, use_calc_stream=False)
        comm.recv(torch.zeros(4, 3), peer=peer, use_calc_stream=False)
    return work


def interrupted_then_late(comm: Any) -> None:
    """The deadline of the call still holds for a wait after an interrupted one."""
    ring = commlib.new_ring(23, [0, 1], timeout=4)
    assert ring is not None
    previous = signal.signal(signal.SIGALRM, _interrupt)
    if comm.rank == 0:
        work = ops.all_reduce(torch.ones(3), 23, **ASYNC)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with raises(KeyboardInterrupt):
            work.wait()
        for _ in range(2):
            with raises(CommTimeout, "ring 23"):
                work.wait()
    signal.signal(signal.SIGALRM, previous)
    comm.exchange([])
    commlib.CommContextManager.instance().close(23)


def test_interrupted_wait(cpu_ranks: Ranks) -> None:
    cpu_ranks(interrupted)
    cpu_ranks(interrupted_then_late)
