"""Rings: who may create them, how members meet, what a missing or confused member leads to."""

import gc
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import commlib
from commlib import ops
from commlib.errors import (
    ArgumentError,
    DeviceError,
    EngineError,
    RingError,
)
from tests.support.checks import assert_bits_equal, assert_equal, raises, until
from tests.support.ranks import NewRanks
from tests.support.runs_on import runs_on

manager = commlib.CommContextManager.instance()


def gathered(ring: Any) -> list[int]:
    """The global ranks that answer on ``ring``, in its order."""
    mine = torch.tensor([commlib.comm().rank], device=ring.device)
    return ops.all_gather(mine, ring.ring_id).tolist()


@runs_on("ranks")
def test_same_members_give_the_same_ring(comm: Any) -> None:
    ring = commlib.new_ring(5, [1, 0])
    assert ring is not None
    assert_equal(
        (ring.rank, ring.size, ring.ranks), (1 - comm.rank, 2, (1, 0)), "position in the ring"
    )
    assert_equal(gathered(ring), [1, 0], "order of the ring")
    assert_equal(commlib.new_ring(5, (1, 0)) is ring, True, "same members give the same context")
    typed = "call commlib.close_ring(5) on its members first"
    with raises(RingError, "ring 5 exists with ranks [1, 0]", "[0, 1]", typed):
        commlib.new_ring(5, [0, 1])
    assert_equal(manager.rings(), [0, 5], "rings in order of creation")
    commlib.close_ring(5)
    assert_equal(gathered(commlib.new_ring(5, [0, 1])), [0, 1], "other members, as the text says")
    manager.close(5)
    ring = commlib.new_ring(5, [1, 0])
    assert ring is not None
    manager.close(5)
    manager.close(5)
    with raises(RingError, "ring 5 was closed", "rings here: [0]", "commlib.new_ring(5"):
        commlib.comm(5)
    with raises(RingError, "closed", "ring 5"):
        ring.all_reduce(torch.ones(1, device=comm.device), torch.ones(1, device=comm.device))
    again = commlib.new_ring(5, [1, 0])
    assert_equal(gathered(again), [1, 0], "created again")
    manager.close(5)


@runs_on("ranks")
def test_bad_members(comm: Any) -> None:
    for ring_id, members in ((6, [0, 0]), (6, [0, 2]), (6, []), (6, [-1, 0]), (-1, [0, 1])):
        with raises(RingError, str(ring_id)):
            commlib.new_ring(ring_id, members)
    for wrong in (2, ["a"], [0.0, 1.7], None):
        with raises(ArgumentError, f"ranks={wrong!r}", "whole numbers from 0 to 1", "new_ring"):
            commlib.new_ring(6, wrong)
    for name in ("x", -1, 1.5, [0]):
        with raises(RingError, f"ring_id={name!r}: expected a whole number >= 0"):
            commlib.comm(name)
    with raises(RingError, "ring 90909 does not exist", "rings here: [0]"):
        commlib.comm(90909)  # no test makes such a ring: a closed one has another error
    with raises(RingError, f"on rank {comm.rank}", "only members"):
        manager.create(6, [1 - comm.rank])
    assert_equal(manager.rings(), [0], "nothing was created")


def subgroups(comm: Any) -> None:
    """Rings inside rings, two disjoint ones at once, and ranks that take no part."""
    begin = time.monotonic()
    pair = commlib.new_ring(1, [0, 1] if comm.rank < 2 else [2, 3])
    assert pair is not None
    assert_equal(gathered(pair), [0, 1] if comm.rank < 2 else [2, 3], "disjoint rings of one id")
    alone = commlib.new_ring(10 + comm.rank, [comm.rank])
    assert alone is not None
    x = torch.arange(3.0)
    assert_bits_equal(ops.all_reduce(x, alone.ring_id), x, "a ring of one is the identity")
    row = next(row for row in manager.report() if row["ring_id"] == alone.ring_id)
    assert_equal((row["communicator"], row["size"]), (False, 1), "no communicator for one rank")
    odd = commlib.new_ring(2, [3, 1])
    assert_equal(odd is None, comm.rank in (0, 2), "only members get a context")
    if odd is not None:
        assert_equal(gathered(odd), [3, 1], "a ring across two others")
    with raises(RingError, *(["not a member of ring 2 ([3, 1])"] if odd is None else ["ring 3"])):
        commlib.comm(2 if odd is None else 3)
    if odd is None:
        alone = commlib.new_ring(2, [comm.rank])
        assert_equal(commlib.comm(2) is alone, True, "a member now")
        manager.close(2)
        with raises(RingError, "ring 2 was closed"):
            commlib.comm(2)
    assert time.monotonic() - begin < 30
    manager.close(1)


def test_subgroups(new_ranks: NewRanks) -> None:
    with new_ranks(4) as ranks:
        ranks(subgroups)


def _store_threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "commlib store a PrefixStore"}


@runs_on("ranks")
def test_given_stores(comm: Any) -> None:
    """A store that the caller gives leaves nothing of it with the manager.

    Rings that earlier tests aborted keep theirs, with the memory that their kernels may still use.
    """
    before = _store_threads()
    port = int(os.environ["MASTER_PORT"])
    base = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    for number in range(4):
        store = dist.PrefixStore(f"given {number // 2}", base)
        manager.create(69, [0, 1], store=store, device=comm.device)
        assert_equal(gathered(manager.get(69)), [0, 1], "the ring works")
        manager.close(69)
        del store
        gc.collect()
        until(lambda: _store_threads() <= before, "its thread has ended")


@runs_on("ranks")
def test_threads(comm: Any) -> None:
    """Many threads ask for one ring at once: one is made, all get it."""
    got: list[Any] = []
    asking = [
        threading.Thread(target=lambda: got.append(commlib.new_ring(8, [0, 1]))) for _ in range(8)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(30)
    assert_equal([ring is got[0] for ring in got], [True] * 8, "one context for all threads")
    assert_equal(gathered(got[0]), [0, 1], "and it works")
    manager.close(8)


def restarted(comm: Any) -> None:
    """Everything closed, twice, then a new start; the flag may change in between."""
    engine = comm.engine
    commlib.shutdown()
    commlib.shutdown()
    assert_equal(manager.rings(), [], "no ring is left")
    with raises(RingError, "commlib.init()"):
        commlib.comm()
    unified = commlib.flags.get("FLAGS_dynamic_static_unified_comm")
    with commlib.flags.override("FLAGS_dynamic_static_unified_comm", not unified):
        other = commlib.init()
        assert_equal(other.engine == engine, False, "the other engine")
        assert_equal(gathered(other), [0, 1], "works")
        commlib.shutdown()
    assert_equal(commlib.init().engine, engine, "and back")


def test_shutdown_and_init(new_ranks: NewRanks) -> None:
    with new_ranks(2) as ranks:
        ranks(restarted)


@runs_on("ranks")
def test_failed_rings_are_not_returned(comm: Any) -> None:
    """A failed ring is not returned: the program closes it first."""
    ring = commlib.new_ring(9, [0, 1])
    assert ring is not None
    first = ring._health.failed("exchange", RuntimeError("of the test"))
    with raises(EngineError, "reported a failure"):
        raise first
    again = ring._health.failed("all_reduce", first)  # whose step was the exchange
    assert_equal((type(again), str(again)), (EngineError, str(first)), "the error of the call")
    assert_equal(len(ring._errors()), 1, "errors")
    with raises(
        RingError, "ring 9 exists and can't be used", "failed in exchange", "close_ring(9)"
    ):
        commlib.new_ring(9, [0, 1])
    manager.close(9)
    assert_equal(gathered(commlib.new_ring(9, [0, 1])), [0, 1], "created again")


@runs_on("ranks")
def test_another_device_or_timeout(comm: Any) -> None:
    """A second init() returns the ring, unless it asks for another one."""
    assert_equal(commlib.init() is comm, True, "the same ring")
    assert_equal(commlib.init(device=comm.device, timeout=comm.timeout) is comm, True, "as it is")
    with raises(RingError, f"timeout {comm.timeout:g} s; given 5 s", "shutdown()"):
        commlib.init(timeout=5)
    with raises(DeviceError, "device='gpu': expected 'cuda', 'cuda:N' or 'cpu'"):
        commlib.init(device="gpu")
    other = "gloo" if comm.device.type == "cuda" else "nccl"
    with raises(RingError, f"ring 0 exists on {comm.device}; given backend={other!r}"):
        commlib.init(other)
    ring = commlib.new_ring(9, [0, 1], timeout=20)
    assert_equal(commlib.new_ring(9, [0, 1], timeout=20) is ring, True, "the same timeout")
    with raises(RingError, "ring 9 exists with timeout 20 s; given 5 s", "close_ring(9)"):
        commlib.new_ring(9, [0, 1], timeout=5)


@runs_on("ranks")
def test_abort(comm: Any) -> None:
    ring = commlib.new_ring(9, [0, 1])
    assert ring is not None
    ring.abort()
    with raises(RingError, "ring 9", "aborted"):
        ops.all_reduce(torch.ones(2, device=comm.device), 9)
    again = commlib.new_ring(9, [1, 0])
    assert_equal(again is ring, False, "an aborted ring is created again")
    assert_equal(gathered(again), [1, 0], "with other members, too")
    manager.close(9)
    last: Any = commlib.new_ring(9, [0, 1])
    assert_equal(gathered(last), [0, 1], "created again")
    last.exchange([])  # an abort ends the calls that a peer has not finished
    comm.abort()
    assert_equal(commlib.init() is comm, False, "ring 0 is created again")
    assert_equal(gathered(commlib.comm()), [0, 1], "and works")
    manager.close(9, abort=True)
    assert_equal(manager.has(9), False, "the end of ring 9")


@runs_on("cpu_ranks")
def test_close_with_a_call_that_never_ends(comm: Any) -> None:
    """A call that never ends holds close() until its deadline, and abort() not at all."""
    for ring_id, abort in ((50, False), (51, True)):
        ring = commlib.new_ring(ring_id, [0, 1], timeout=30)
        assert ring is not None
        begin = time.monotonic()
        if comm.rank == 0:
            x = torch.ones(2)
            work = ring.all_reduce(x, x, use_calc_stream=False, sync_op=False)
            with commlib.flags.override("FLAGS_comm_close_timeout_s", 1):
                manager.close(ring_id, abort=abort)
            late = ["did not return within" in error for error in ring._errors()]
            assert late == ([] if abort else [True]), ring._errors()  # abort() ends the call
            assert time.monotonic() - begin < 25
            del work
        comm.barrier()
        manager.close(ring_id)


@runs_on("ranks")
def test_abort_during_a_stuck_call(comm: Any) -> None:
    """abort() takes no lock: a thread that is stuck in a call, holding it, can be helped."""
    ring = commlib.new_ring(52, [0, 1])
    assert ring is not None
    with ring._lock:
        thread = threading.Thread(target=ring.abort)
        thread.start()
        thread.join(20)
        assert_equal(thread.is_alive(), False, "abort() waits for the lock")
    with raises(RingError, "aborted"):
        ring.barrier()
    manager.close(52)


def engines(comm: Any) -> None:
    """Members that come with different engines are notified at once, by name."""
    commlib.shutdown()
    begin = time.monotonic()
    with commlib.flags.override("FLAGS_dynamic_static_unified_comm", comm.rank == 0):
        with raises(EngineError, "ranks [0] on gloo (cpu)", "ranks [1] on c10d (cpu)"):
            commlib.init(device="cpu", timeout=60)
        assert time.monotonic() - begin < 20
    assert_equal(gathered(commlib.init(device="cpu")), [0, 1], "with one engine")


def test_different_engines(new_ranks: NewRanks) -> None:
    with new_ranks(2) as ranks:
        ranks(engines)
