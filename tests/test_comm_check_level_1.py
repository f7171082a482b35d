"""FLAGS_comm_check=1: ranks that wait in different calls, and reports that cost little."""

import logging
import os
import signal
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import commlib
from commlib.core import dispatch
from commlib.core.calls.log import EVERY, CallLog
from commlib.core.reporter import reporter
from commlib.deadlines import Deadline
from commlib.errors import (
    ArgumentError,
    CommTimeout,
    DeviceError,
    EngineError,
    FlagError,
    MismatchError,
    PeerTimeout,
)
from tests.support.checks import assert_equal, raises, until
from tests.support.ranks import NewRanks, Ranks
from tests.support.runs_on import runs_on
from tests.test_comm_check import ASYNC, CHECK, ones, ring_of, works

# -- level 1 -------------------------------------------------------------------------------------


@runs_on("cpu_ranks")
def test_ranks_that_wait_in_different_calls(comm: Any) -> None:
    """Two ranks make different calls: both errors name both, long before a deadline."""
    with ring_of(comm, 1, timeout=8) as ring:
        for _ in range(15):
            ring.all_reduce(*[ones(4)] * 2)
        texts = ["call 16 is", "all_reduce float32 [4] op=sum", "all_gather float32 [6]"]
        with raises(MismatchError, f"rank {1 - comm.rank} (position", *texts):
            if comm.rank == 0:
                ring.all_reduce(*[ones(4)] * 2)
            else:
                ring.all_gather(ones(12), ones(6))
        comm.barrier()


@runs_on("three_ranks")
def test_a_rank_that_never_called(comm: Any) -> None:
    """A deadline names the rank that has not called, where each rank is, and gloo only as cause."""
    with ring_of(comm, 1, timeout=8) as ring:
        for _ in range(5):
            ring.all_reduce(*[ones(4)] * 2)
        if comm.rank != 1:
            with pytest.raises((CommTimeout, EngineError)) as caught:
                ring.all_reduce(*[ones(4)] * 2)
            text, cause = str(caught.value), caught.value.__cause__
            assert_equal("rank 1 (position 1 in the ring) had made 5 calls" in text, True, text)
            assert_equal("when it last published" in text, True, text)
            assert_equal("gloo/" in text or "third_party" in text, False, text)
            assert_equal(isinstance(cause, RuntimeError), True, repr(cause))
        comm.barrier()


@runs_on("cpu_ranks")
def test_calls_that_were_not_published_yet(comm: Any) -> None:
    """The log of a rank that computes for long is that of earlier, and the text says so."""
    with ring_of(comm, 1) as ring:
        reporter.remove(ring._reports)  # its thread could publish the calls below
        works(ring, "before")
        ring._reports.round()
        for _ in range(7):
            works(ring, "not published")
        comm.barrier()
        if comm.rank == 0:
            with raises(CommTimeout, "had made 1 call (all_reduce", "when it last published"):
                ring.all_reduce(ones(2), timeout=0.5)
        comm.barrier()


@runs_on("cpu_ranks")
def test_close(comm: Any) -> None:
    """The rank that closes last finds that calls have differed, though none has failed."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commlib").addHandler(handler)
    manager = commlib.CommContextManager.instance()
    with ring_of(comm, 1) as ring:
        ring._board = None  # as between several hosts
        ring.all_reduce(*[ones(4)] * 2)
        ring.all_reduce(*[ones(4)] * 2, op="max" if comm.rank else "sum")
        ring.all_reduce(*[ones(4)] * 2)
        if comm.rank == 1:
            comm.barrier()
        manager.close(60)
        if comm.rank == 0:
            comm.barrier()
    logging.getLogger("commlib").removeHandler(handler)
    errors = comm.exchange([len(ring._errors())])
    assert_equal(sum(row[0] for row in errors) > 0, True, "somebody has found it")
    if comm.rank == 1:
        text = ring._errors()[0]
        sum_, max_ = "all_reduce float32 [4] op=sum", "all_reduce float32 [4] op=max"
        assert_equal(f"call 2 is {max_} here and {sum_} there" in text, True, text)
        assert_equal(any(text in line for line in said), True, f"no warning in {said}")


@runs_on("cpu_ranks")
def test_windows_of_calls(comm: Any) -> None:
    """A difference that the last calls do not show any more is found by windows of calls."""
    with ring_of(comm, 1, timeout=8) as ring:
        ring._board, x = None, ones(1)  # as between several hosts
        for call in range(2 * EVERY + 100):
            wrong = call == EVERY + 10 and comm.rank == 1
            ring.all_reduce(x, ones(1), op="max" if wrong else "sum")
        until(
            lambda: any(r[0] for r in comm.exchange([len(ring._errors())])), "nobody has found it"
        )
        for text in ring._errors():
            assert_equal(f"they differ in calls {EVERY + 1} to " in text, True, text)


@runs_on("cpu_ranks")
def test_right_calls_have_one_fingerprint(comm: Any) -> None:
    """Right calls, with what ranks may give differently, have one fingerprint."""
    with ring_of(comm, 1) as ring:
        total = torch.zeros(2) if comm.rank == 0 else None
        ring.reduce(total, ones(2), root=0)
        ring.scatter(ones(2), ones(4) if comm.rank == 0 else None, root=0)
        ring.gather(torch.empty(4) if comm.rank == 1 else None, ones(2), root=1)
        ring.broadcast(ones(3), ones(3) if comm.rank == 1 else None, root=1)
        counts = [1 + (comm.rank + peer) % 2 for peer in range(2)]
        ring.all_to_all(*[ones(3)] * 2, in_splits=counts[::-1], out_splits=counts[::-1])
        ring.all_to_all(ones(2, 3), ones(6))
        works(ring, "everything")
        with ring.group():
            ring.all_reduce(*[ones(2)] * 2)
            ring.send(ones(1), peer=1 - comm.rank)
            ring.recv(ones(1), peer=1 - comm.rank)
        log = ring._call_log.snapshot()
        assert_equal(log.number, 8, "calls of all members: messages are left out")
        values = comm.exchange([log.value])
        assert_equal(values[0], values[1], f"fingerprints of {log.recent}")
    assert_equal(ring._errors(), [], "differences")


@runs_on("cpu_ranks")
def test_reset(comm: Any) -> None:
    """After reset() calls are compared again, and the next failure shows the calls of then."""
    with ring_of(comm, 1) as ring:
        for calls in (1, 2):
            works(ring, "reset")
            comm.barrier()
            error = ring._health.failed("all_reduce", PeerTimeout("a rank did not come"))
            assert_equal(
                f"this rank is at call {calls} (all_reduce" in str(error), True, str(error)
            )
            ring.reset()
        assert_equal(ring._call_log.snapshot().number, 2, "calls")


@runs_on("cpu_ranks")
def test_keys_are_taken_away(comm: Any) -> None:
    """A closed ring leaves none of its keys in the store."""
    manager = commlib.CommContextManager.instance()
    with ring_of(comm, 1) as ring:
        store = ring._hosts.store("calls")
        works(ring, "nothing")
        until(lambda: store.check([f"at/{comm.rank}"], Deadline(5)), "nothing is published")
        manager.close(60)
        comm.barrier()
        names = [f"{kind}/{rank}" for kind in ("at", "log") for rank in range(2)]

        def left() -> list[str]:
            return [name for name in [*names, "left"] if store.check([name], Deadline(5))]

        until(lambda: not left(), "keys stay")


@runs_on("cpu_ranks")
def test_level_0(comm: Any) -> None:
    """Level 0 keeps no log, and its deadlines name what the call itself says."""
    with ring_of(comm, 0, timeout=6, ranks=[1, 0]) as ring:
        assert_equal((ring._call_log, ring._compares), (None, False), "level 0")
        if comm.rank == 0:
            with pytest.raises(CommTimeout, match=r"waiting for rank 1 \(position 0 in the ring\)"):
                ring.recv(ones(2), peer=0)
        comm.barrier()


def gone(comm: Any) -> None:
    """The rank that closed a connection is named; gloo's own words are the cause only."""
    with ring_of(comm, 1, timeout=20) as ring:
        ring.barrier()
        if comm.rank == 1:
            comm.exchange([])
            ring.abort()
        else:
            work = ring.all_reduce(*[ones(2)] * 2, **ASYNC)
            comm.exchange([])
            with pytest.raises(EngineError) as caught:
                work.wait()
            text = str(caught.value)
            who = text.partition(" closed its connection")[0].rpartition(": ")[2]
            others = [rank for rank in range(comm.size) if rank != comm.rank]
            named = {"rank 1 (position 1 in the ring)"}  # by its lock, or as the only other one
            unknown = {f"one of the ranks {others}"} if others[1:] else set()
            assert_equal(who in named | unknown, True, text)
            assert_equal("gloo/" in text or "GLHF" in text, False, text)
            assert_equal(
                "onnection" in str(caught.value.__cause__), True, repr(caught.value.__cause__)
            )
        comm.barrier()


def test_a_rank_that_has_gone(cpu_ranks: Ranks) -> None:
    cpu_ranks(gone)


def test_the_own_rank_is_not_accused(three_ranks: Ranks) -> None:
    three_ranks(gone)


def killed(comm: Any, rank: int) -> None:
    """In a ring of three that share a host the lock of the dead rank names it."""
    comm.exchange([])  # sets the shared memory up
    if comm.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises((EngineError, CommTimeout), f"rank {rank} (position {rank} in the ring)"):
        for _ in range(100):
            comm.all_reduce(*[ones(2)] * 2)
    commlib.shutdown(abort=True)


def test_a_rank_that_was_killed(new_ranks: NewRanks) -> None:
    with new_ranks(3) as ranks:
        ranks(killed, 1, lost=frozenset([1]))


def test_flag() -> None:
    for text in ("3", "-1", "", "on", "1.0"):
        with pytest.raises(FlagError, match="expected 0, 1 or 2"):
            commlib.flags.set(CHECK, text)
    assert_equal(commlib.flags.get(CHECK), 1, "the default")


def counting(fences: object) -> Any:
    """Return what of a ring is used to count its calls; ``fences`` is None on a CPU."""
    log = CallLog()
    return SimpleNamespace(_calls=0, _last=None, _call_log=log, _fences=fences, _device_number=0)


def count(ring: Any, elements: int) -> None:
    """Count a call."""
    entry = ("all_gather", elements, torch.float32, None, None)
    dispatch.count(ring, "all_gather", entry, None)


def test_calls_of_a_capture_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = counting(fences=object())
    captures = {7: False, 8: True}
    for stream in (0, *captures):  # the driver is not asked about 0, the default stream
        monkeypatch.setattr(dispatch, "current_raw", lambda _, value=stream: value)
        monkeypatch.setattr(dispatch, "stream_captures", partial(captures.__getitem__, stream))
        count(ring, 1)
    shot = ring._call_log.snapshot()
    assert_equal((ring._calls, shot.number, shot.captured), (3, 2, True), "the log")


def test_a_log_of_many_calls_stays_small() -> None:
    ring = counting(fences=None)
    for elements in range(3 * EVERY + 1):
        count(ring, elements)
    shot = ring._call_log.snapshot()
    assert_equal((shot.number, len(shot.recent)), (3 * EVERY + 1, 32), "the log")
    last = (3 * EVERY + 1, f"all_gather float32 [{3 * EVERY}]")
    assert_equal(shot.recent[-1], last, "the last call")
    assert_equal(len(ring._call_log.window), 1, "entries that are kept")
    assert_equal([number for number, _ in shot.windows], [EVERY, 2 * EVERY, 3 * EVERY], "windows")


def test_wrong_arguments_are_errors_of_ours() -> None:
    with pytest.raises(DeviceError, match="device='gpu': expected 'cuda'"):
        commlib.init(device="gpu")
    ring = commlib.init(device="cpu")
    try:
        with pytest.raises(ArgumentError, match=r"nbytes='1MB'.*pass x.nbytes"):
            ring.explain("1MB", torch.float32)
        with pytest.raises(
            ArgumentError, match="all_reduce takes x first; pass the output as out="
        ):
            commlib.ops.all_reduce(ones(2), ones(2))  # type: ignore[call-overload]
    finally:
        commlib.shutdown()
