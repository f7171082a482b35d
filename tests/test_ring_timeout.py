"""A deadline per call: shorter and longer than the ring's, of calls and of waits for a Work."""

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import commlib
from commlib.errors import ArgumentError, CommTimeout, RingError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

AGES_S, SOON_S = 20.0, 0.3
SHORT_S = 1.0  # of a ring whose members must have met by then, on a busy machine
ASYNC = {"use_calc_stream": False, "sync_op": False}


def calls_of(ring: Any) -> dict[str, Any]:
    """Return every collective as a function of its options, with the value that it gives."""
    size, rank, device = ring.size, ring.rank, ring.device
    x = torch.arange(4.0, device=device) + rank
    total = torch.arange(4.0) * size + sum(range(size))
    both = torch.cat([torch.arange(4.0) + r for r in range(size)])
    part = total[2 * rank : 2 * rank + 2]
    halves = torch.cat([torch.arange(4.0)[2 * rank : 2 * rank + 2] + r for r in range(size)])
    peer = 1 - rank
    root = rank == 1

    def moved(**how: Any) -> Any:
        return ring.send(x, peer=peer, **how) if root else ring.recv(x * 0, peer=peer, **how)

    return {
        "all_reduce": (lambda **how: ring.all_reduce(x * 0, x, **how), total),
        "all_gather": (lambda **how: ring.all_gather(x.new_empty(8), x, **how), both),
        "reduce_scatter": (lambda **how: ring.reduce_scatter(x.new_empty(2), x, **how), part),
        "reduce": (lambda **how: ring.reduce(x * 0, x, root=1, **how), total if root else x * 0),
        "broadcast": (lambda **how: ring.broadcast(x * 0, x, root=1, **how), both[4:]),
        "gather": (
            lambda **how: ring.gather(x.new_zeros(8), x, root=1, **how),
            both if root else both * 0,
        ),
        "scatter": (
            lambda **how: ring.scatter(x.new_empty(2), x if root else None, root=1, **how),
            both[4 + 2 * rank : 6 + 2 * rank],
        ),
        "all_to_all": (lambda **how: ring.all_to_all(x * 0, x, **how), halves),
        "send and recv": (moved, None if root else both[4:]),
        "barrier": (lambda **how: ring.barrier(**how), None),
    }


NAMES = ["all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "gather", "scatter"]
NAMES += ["all_to_all", "send and recv", "barrier"]


def assert_value(actual: Any, expected: Any, what: str) -> None:
    if expected is None:
        assert_equal(actual, None, what)
    else:
        assert_bits_equal(actual.cpu(), expected.cpu(), what)


@runs_on("ranks")
def test_in_time(ring: Any) -> None:
    for name, (call, expected) in calls_of(ring).items():
        assert_value(call(timeout=AGES_S), expected, name)
        assert_value(call(timeout=timedelta(seconds=AGES_S), use_calc_stream=False), expected, name)
        work = call(timeout=AGES_S, **ASYNC)
        assert_value(work.wait(), expected, f"{name}, later")
        assert_value(call(**ASYNC).wait(timeout=AGES_S), expected, f"{name}, wait with a timeout")
    x = torch.ones(3, device=ring.device)
    with ring.group(timeout=AGES_S):
        twice = [ring.all_reduce(x), ring.all_reduce(2 * x)]
    assert_equal([one[0].item() for one in twice], [2.0, 4.0], "a group")
    out = [torch.empty(3, device=ring.device) for _ in range(ring.size)]
    ring.all_gather_v(out, x + ring.rank, timeout=AGES_S)
    assert_equal([one[0].item() for one in out], [1.0, 2.0], "all_gather_v")


def late(ring: Any, name: str, form: str) -> None:
    """Rank 0 calls alone; its deadline passes long before that of the ring."""
    new_ring = commlib.new_ring(320, ring.ranks, timeout=AGES_S)
    assert new_ring is not None
    new_ring.barrier()
    call = calls_of(new_ring)[name][0]
    begun = time.monotonic()
    if new_ring.rank == 0:
        with raises(CommTimeout, f"did not finish within {SOON_S:g} s", "ring 320", "rank 1"):
            if form == "call":
                call(timeout=SOON_S)
            elif form == "work":
                call(timeout=SOON_S, **ASYNC).wait()
            elif form == "wait":
                call(**ASYNC).wait(timeout=SOON_S)
            else:
                with new_ring.group(timeout=SOON_S):
                    call()
        assert_equal(time.monotonic() - begun < AGES_S / 2, True, "long before the ring's")
        with raises(RingError, "the ring can't be used"):
            new_ring.all_reduce(torch.ones(2))
    ring.barrier()
    commlib.close_ring(320, abort=True)


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_are_late(cpu_ranks: Ranks, name: str) -> None:
    if name not in ("broadcast", "scatter", "send and recv"):  # of which rank 0 only receives
        cpu_ranks(late, name, "call")
    else:
        cpu_ranks(late, name, "work")


@pytest.mark.parametrize("name", ["all_reduce", "send and recv"])
@pytest.mark.parametrize("form", ["call", "work", "wait", "group"])
def test_forms_that_are_late(cpu_ranks: Ranks, name: str, form: str) -> None:
    cpu_ranks(late, name, form)


@runs_on("cpu_ranks")
def test_longer_than_the_ring(ring: Any) -> None:
    """The ring's timeout passes while a member is late, that of the call does not."""
    short = commlib.new_ring(321, ring.ranks, timeout=SHORT_S)
    assert short is not None
    short.barrier(timeout=AGES_S)
    for name, (call, expected) in calls_of(short).items():
        ring.barrier()
        if name in ("all_reduce", "send and recv", "all_to_all"):
            if short.rank == 1:
                time.sleep(1.5 * SHORT_S)
            assert_value(call(timeout=AGES_S), expected, name)
    ring.barrier()
    commlib.close_ring(321)


@runs_on("cpu_ranks")
def test_a_second_waiter_is_late(ring: Any) -> None:
    """Another thread waits for the same Work, without a deadline."""
    new_ring: Any = commlib.new_ring(322, ring.ranks, timeout=AGES_S)
    new_ring.barrier()
    if new_ring.rank == 0:
        work = new_ring.all_reduce(torch.ones(2), **ASYNC)
        first = threading.Thread(target=work.wait)
        first.start()
        while not work._pending._lock.locked():
            time.sleep(0.001)
        with raises(CommTimeout, f"did not finish within {SOON_S:g} s", "ring 322", "rank 1"):
            work.wait(timeout=SOON_S)
        ring.barrier()
        first.join()
        with raises(RingError, "the ring can't be used"):
            new_ring.barrier()
    else:
        ring.barrier()
        new_ring.all_reduce(torch.ones(2))
    ring.barrier()
    commlib.close_ring(322, abort=True)


@runs_on("three_ranks")
def test_the_peer_of_a_late_receive(ring: Any) -> None:
    """In a ring of several the peer is named alone, to the waiter and to a second one."""
    for second in (False, True):
        new_ring: Any = commlib.new_ring(323, ring.ranks, timeout=AGES_S)
        new_ring.barrier()
        if new_ring.rank == 0:
            work = new_ring.recv(torch.zeros(2), peer=2, **ASYNC)
            if second:
                threading.Thread(target=work.wait, daemon=True).start()
                while not work._pending._lock.locked():
                    time.sleep(0.001)
            with raises(CommTimeout, f"within {SOON_S:g} s while waiting for rank 2 (position 2"):
                work.wait(timeout=SOON_S)
        ring.barrier()
        commlib.close_ring(323, abort=True)


@runs_on("ranks")
def test_bad_input(ring: Any) -> None:
    x = torch.ones(4, device=ring.device)
    for timeout in (0, -1, float("inf"), "soon", True):
        with raises(ArgumentError, "all_reduce on ring 0", f"timeout={timeout!r}"):
            ring.all_reduce(x, timeout=timeout)
        with raises(ArgumentError, "group on ring 0"), ring.group(timeout=timeout):
            pass
    with raises(ArgumentError, "ring.group(timeout=...)"), ring.group():
        ring.all_reduce(x, timeout=5)
    with raises(ArgumentError, "use_calc_stream=False"):
        ring.all_reduce(x, timeout=5, sync_op=False)
    work = ring.all_reduce(x, **ASYNC)
    with raises(ArgumentError, "timeout=0"):
        work.wait(timeout=0)
    work.wait(5)
    ring.barrier()


@runs_on("gpu_ranks")
def test_a_capture(ring: Any) -> None:
    """The host can't wait for what a capture records."""
    ring.connect()
    x, graph = torch.ones(4, device=ring.device), torch.cuda.CUDAGraph()
    with raises(ArgumentError, "CUDA graph capture"), torch.cuda.graph(graph):
        ring.all_reduce(x, x, timeout=5)
    ring.barrier()
