"""Rings: who may create them, how members meet, what a missing or confused member leads to."""

import gc
import os
import threading
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import commlib
from commlib import ops
from commlib.errors import (
    ArgumentError,
    CommError,
    CommTimeout,
    EngineError,
    RingError,
    RingOrderError,
)
from commlib.worker_threads import workers
from tests.support.checks import close, refused, same, until
from tests.support.ranks import Ranks, World
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
    same((ring.rank, ring.size, ring.ranks), (1 - comm.rank, 2, (1, 0)), "position in the ring")
    same(gathered(ring), [1, 0], "order of the ring")
    same(commlib.new_ring(5, (1, 0)) is ring, True, "same members give the same context")
    typed = "call commlib.close_ring(5) on its members first"
    with refused(RingError, "ring 5 exists with ranks [1, 0]", "[0, 1]", typed):
        commlib.new_ring(5, [0, 1])
    same(manager.rings(), [0, 5], "rings in order of creation")
    commlib.close_ring(5)
    same(gathered(commlib.new_ring(5, [0, 1])), [0, 1], "other members, as the text says")
    manager.close(5)
    ring = commlib.new_ring(5, [1, 0])
    assert ring is not None
    manager.close(5)
    manager.close(5)
    with refused(RingError, "ring 5 was closed", "rings here: [0]", "commlib.new_ring(5"):
        commlib.comm(5)
    with refused(RingError, "closed", "ring 5"):
        ring.all_reduce(torch.ones(1, device=comm.device), torch.ones(1, device=comm.device))
    again = commlib.new_ring(5, [1, 0])
    same(gathered(again), [1, 0], "created again")
    manager.close(5)


@runs_on("ranks")
def test_bad_members(comm: Any) -> None:
    for ring_id, members in ((6, [0, 0]), (6, [0, 2]), (6, []), (6, [-1, 0]), (-1, [0, 1])):
        with refused(RingError, str(ring_id)):
            commlib.new_ring(ring_id, members)
    for wrong in (2, ["a"], [0.0, 1.7], None):
        with refused(ArgumentError, f"ranks={wrong!r}", "whole numbers from 0 to 1", "new_ring"):
            commlib.new_ring(6, wrong)
    for name in ("x", -1, 1.5, [0]):
        with refused(RingError, f"ring_id={name!r}: expected a whole number >= 0"):
            commlib.comm(name)
    with refused(RingError, "ring 9 does not exist", "rings here: [0]"):
        commlib.comm(9)
    with refused(RingError, f"on rank {comm.rank}", "only members"):
        manager.create(6, [1 - comm.rank])
    same(manager.rings(), [0], "nothing was created")


def subgroups(comm: Any) -> None:
    """Rings inside rings, two disjoint ones at once, and ranks that take no part."""
    begin = time.monotonic()
    pair = commlib.new_ring(1, [0, 1] if comm.rank < 2 else [2, 3])
    assert pair is not None
    same(gathered(pair), [0, 1] if comm.rank < 2 else [2, 3], "disjoint rings of one id")
    alone = commlib.new_ring(10 + comm.rank, [comm.rank])
    assert alone is not None
    x = torch.arange(3.0)
    close(ops.all_reduce(x, alone.ring_id), x, "a ring of one is the identity")
    row = next(row for row in manager.report() if row["ring_id"] == alone.ring_id)
    same((row["communicator"], row["size"]), (False, 1), "no communicator for one rank")
    odd = commlib.new_ring(2, [3, 1])
    same(odd is None, comm.rank in (0, 2), "only members get a context")
    if odd is not None:
        same(gathered(odd), [3, 1], "a ring across two others")
    with refused(RingError, *(["not a member of ring 2 ([3, 1])"] if odd is None else ["ring 3"])):
        commlib.comm(2 if odd is None else 3)
    if odd is None:
        alone = commlib.new_ring(2, [comm.rank])
        same(commlib.comm(2) is alone, True, "a member now")
        manager.close(2)
        with refused(RingError, "ring 2 was closed"):
            commlib.comm(2)
    assert time.monotonic() - begin < 30
    manager.close(1)


def test_subgroups(world: World) -> None:
    with world(4) as ranks:
        ranks(subgroups)


def missing(comm: Any) -> None:
    """Rank 2 comes too late: the others name it, and their next attempt meets it."""
    if comm.rank < 2:
        begin = time.monotonic()
        call = "call commlib.new_ring(4, [0, 1, 2])"
        with refused(CommTimeout, "ring 4", "ranks [2]", "5 s", call, "FLAGS_comm_timeout_s"):
            commlib.new_ring(4, [0, 1, 2], timeout=5)
        assert time.monotonic() - begin > 4
        same(manager.has(4), False, "a failed creation leaves nothing")
    comm.barrier()
    same(gathered(commlib.new_ring(4, [0, 1, 2])), [0, 1, 2], "the next attempt")


def crossed(comm: Any) -> None:
    """Members that create two rings in different orders see both orders at once."""
    if comm.rank < 2:
        begin = time.monotonic()
        first = 6 + comm.rank
        texts = ("rank 0 created", "rank 1 created", "ring 6 [0, 1]", "ring 7 [0, 1]")
        with refused(RingOrderError, *texts):
            commlib.new_ring(first, [0, 1], timeout=60)
        assert time.monotonic() - begin < 50
        for ring_id in (6, 7):
            same(gathered(commlib.new_ring(ring_id, [0, 1])), [0, 1], "in one order")


def other_members(comm: Any) -> None:
    """Members that give one ring other lists of ranks see each other's."""
    same_list = "pass the same list"
    begin = time.monotonic()
    if comm.rank < 2:
        given = [comm.rank, 1 - comm.rank]
        with refused(RingError, "rank 0 gave [0, 1]; rank 1 gave [1, 0]", same_list):
            commlib.new_ring(30, given, timeout=60)
    assert time.monotonic() - begin < 50
    comm.barrier()
    if comm.rank:
        commlib.new_ring(31, [1, 2])
    else:
        with refused(CommTimeout, "ranks [1]", "rank 1 gave [1, 2] for ring 31", same_list):
            commlib.new_ring(31, [0, 1], timeout=5)
    comm.barrier()


def circle(comm: Any) -> None:
    """The same over three rings: each rank waits for the next one."""
    rings = {0: (20, [0, 1]), 1: (21, [1, 2]), 2: (22, [0, 2])}
    ring_id, members = rings[comm.rank]
    with refused(RingOrderError, "ring 20", "ring 21", "ring 22"):
        commlib.new_ring(ring_id, members, timeout=60)
    for ring_id, members in rings.values():
        ring = commlib.new_ring(ring_id, members)
        same(ring is not None, comm.rank in members, f"ring {ring_id} in one order")


def test_members_that_do_not_meet(world: World) -> None:
    with world(3) as ranks:
        for job in (missing, crossed, other_members, circle):
            ranks(job)


def create(ring_id: int, timeout: float, got: list[Any]) -> threading.Thread:
    """Create a ring of ranks 0 and 1 in another thread; keep the ring or the error."""

    def body() -> None:
        try:
            got.append(commlib.new_ring(ring_id, [0, 1], timeout=timeout))
        except CommError as error:
            got.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    until(lambda: ring_id in manager._creating or bool(got), "the creation began")
    return thread


def overtaken(comm: Any) -> None:
    """A creation whose peer is missing holds up no other call, and ends when it is closed."""
    got: list[Any] = []
    other = commlib.new_ring(61, [0, 1])
    assert other is not None
    comm.exchange([])  # the hosts meet
    thread = create(60, 600, got) if comm.rank == 0 else None
    same(manager.get(0) is comm, True, "get")
    manager.close(61)
    same(commlib.new_ring(62, [comm.rank]) is None, False, "a ring of one rank")
    same(gathered(commlib.new_ring(63, [0, 1])), [0, 1], "another ring")
    if thread is not None:
        same(got, [], "still waiting")
        with refused(RingError, "ring 60 is being created with ranks [0, 1]; given [0]"):
            commlib.new_ring(60, [0])
        manager.close(60)
        thread.join(30)
        with refused(RingError, "creating ring 60 of ranks [0, 1] on rank 0 was given up", "close"):
            raise got[0]
        manager.close(60)  # twice is harmless
    comm.exchange([])  # the hosts meet
    same(gathered(commlib.new_ring(60, [0, 1])), [0, 1], "the next attempt")


def at_the_same_time(comm: Any) -> None:
    """Rank 0 creates two rings in two threads; rank 1 creates them one after the other.

    Rank 1 begins later: while rank 0 waits in the first ring alone, the two would be a cycle.
    """
    got: list[Any] = []
    if comm.rank == 0:
        thread = create(68, 60, got)
        same(gathered(commlib.new_ring(69, [0, 1])), [0, 1], "the second ring is made first")
        comm.exchange([])  # the hosts meet
        thread.join(60)
    else:
        time.sleep(2)
        same(gathered(commlib.new_ring(69, [0, 1])), [0, 1], "the second ring is made first")
        comm.exchange([])  # the hosts meet
        got.append(commlib.new_ring(68, [0, 1]))
    same(gathered(got[0]), [0, 1], "the first ring")


def overtaken_by_shutdown(comm: Any) -> None:
    """shutdown(abort=True) gives creations up, and stuck calls, and returns."""
    got: list[Any] = []
    stuck = commlib.new_ring(64, [0, 1], timeout=600)
    assert stuck is not None
    comm.exchange([])  # the hosts meet
    if comm.rank == 0:
        thread = create(65, 600, got)
        if comm.device.type == "cpu":
            x = torch.ones(2)
            work = stuck.all_reduce(x, x, use_calc_stream=False, sync_op=False)
        commlib.shutdown(abort=True)
        thread.join(30)
        with refused(RingError, "creating ring 65", "given up: shutdown() was called"):
            raise got[0]
        if comm.device.type == "cpu":
            del work
    else:
        commlib.shutdown()
    same(gathered(commlib.init()), [0, 1], "a new start")


def test_creations_that_are_overtaken(ranks: Ranks) -> None:
    ranks(at_the_same_time)
    ranks(overtaken)
    ranks(overtaken_by_shutdown)


@runs_on("cpu_ranks")
def test_a_member_without_an_engine(comm: Any) -> None:
    """A member whose engine can't even be made is named on every member, by the deadline."""
    kind = type(comm._engine)
    make = kind.__init__

    def fails(self: Any, identity: Any, *parts: Any) -> None:
        make(self, identity, *parts)
        if identity.rank == 1:
            raise MemoryError("of one rank")

    failing = mock.patch.object(kind, "__init__", fails)
    with failing, refused(EngineError, "ring 71", "rank 1: MemoryError: of one rank"):
        commlib.new_ring(71, [0, 1], timeout=4)
    same(gathered(commlib.new_ring(71, [0, 1])), [0, 1], "the next attempt")
    manager.close(71)


@runs_on("ranks")
def test_half_built_rings_free_their_parts(comm: Any) -> None:
    """A member that fails after it has connected frees everything, and so do the others."""
    kind = type(comm._engine)
    connect = kind.open

    def fails(self: Any, meeting: Any, deadline: Any) -> None:
        connect(self, meeting, deadline)
        self.hosts.exchange([1])
        if self.rank == 1:
            raise MemoryError("of one rank")
        self.hosts.exchange([2])

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    counts = []
    kind.open = fails
    try:
        for _ in range(8):
            with refused(EngineError, "ring 66", "rank 1: MemoryError: of one rank"):
                commlib.new_ring(66, [0, 1], timeout=20)
            counts.append(descriptors())
    finally:
        kind.open = connect
    # Threads of gloo and of the stores close some a little later; a leak adds at least 7.
    assert counts[-1] - counts[0] <= 3, f"descriptors after each attempt: {counts}"
    same(gathered(commlib.new_ring(66, [0, 1])), [0, 1], "the next attempt")


@runs_on("ranks")
def test_interrupted_creation(comm: Any) -> None:
    """An interrupt while the engine is set up ends the creation on every member."""
    kind = type(comm._engine)
    connect = kind.open

    def fails(self: Any, meeting: Any, deadline: Any) -> None:
        connect(self, meeting, deadline)
        if self.rank == 1:
            raise KeyboardInterrupt

    kind.open = fails
    try:
        commlib.new_ring(67, [0, 1], timeout=20)
    except KeyboardInterrupt:
        same(comm.rank, 1, "interrupted")
    except EngineError as error:
        same((comm.rank, "rank 1: InterruptedError" in str(error)), (0, True), str(error))
    finally:
        kind.open = connect
    same(manager.has(67), False, "nothing was created")
    same(gathered(commlib.new_ring(67, [0, 1])), [0, 1], "the next attempt")


@runs_on("ranks")
def test_interrupted_at_the_start(comm: Any) -> None:
    """Ctrl-C before anything is made leaves the ring id free."""
    interrupting = mock.patch.object(workers, "reserve", side_effect=KeyboardInterrupt)
    with interrupting, refused(KeyboardInterrupt):
        commlib.new_ring(68, [0, 1])
    same(gathered(commlib.new_ring(68, [0, 1])), [0, 1], "the next attempt")
    manager.close(68)


def _thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@runs_on("ranks")
def test_given_stores(comm: Any) -> None:
    """A store that the caller gives leaves nothing of it with the manager."""
    port = int(os.environ["MASTER_PORT"])
    base = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    for number in range(4):
        store = dist.PrefixStore(f"given {number // 2}", base)
        manager.create(69, [0, 1], store=store, device=comm.device)
        same(gathered(manager.get(69)), [0, 1], "the ring works")
        manager.close(69)
        del store
        gc.collect()
        until(lambda: "commlib store a PrefixStore" not in _thread_names(), "its thread has ended")


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
    same([ring is got[0] for ring in got], [True] * 8, "one context for all threads")
    same(gathered(got[0]), [0, 1], "and it works")
    manager.close(8)


def restarted(comm: Any) -> None:
    """Everything closed, twice, then a new start; the flag may change in between."""
    engine = comm.engine
    commlib.shutdown()
    commlib.shutdown()
    same(manager.rings(), [], "no ring is left")
    with refused(RingError, "commlib.init()"):
        commlib.comm()
    unified = commlib.flags.get("FLAGS_dynamic_static_unified_comm")
    with commlib.flags.override("FLAGS_dynamic_static_unified_comm", not unified):
        other = commlib.init()
        same(other.engine == engine, False, "the other engine")
        same(gathered(other), [0, 1], "works")
        commlib.shutdown()
    same(commlib.init().engine, engine, "and back")


def test_shutdown_and_init(world: World) -> None:
    with world(2) as ranks:
        ranks(restarted)


@runs_on("ranks")
def test_failed_rings_are_not_returned(comm: Any) -> None:
    """A failed ring is not returned: the program closes it first."""
    ring = commlib.new_ring(9, [0, 1])
    assert ring is not None
    with refused(EngineError, "reported a failure"):
        raise ring._health.failed("all_reduce", RuntimeError("of the test"))
    with refused(
        RingError, "ring 9 exists and can't be used", "failed in all_reduce", "close_ring(9)"
    ):
        commlib.new_ring(9, [0, 1])
    manager.close(9)
    same(gathered(commlib.new_ring(9, [0, 1])), [0, 1], "created again")


@runs_on("ranks")
def test_another_device_or_timeout(comm: Any) -> None:
    """A second init() returns the ring, unless it asks for another one."""
    same(commlib.init() is comm, True, "the same ring")
    same(commlib.init(device=comm.device, timeout=comm.timeout) is comm, True, "as it is")
    with refused(RingError, "ring 0 exists with timeout 30 s; given 5 s", "shutdown()"):
        commlib.init(timeout=5)
    other = "gloo" if comm.device.type == "cuda" else "nccl"
    with refused(RingError, f"ring 0 exists on {comm.device}; given backend={other!r}"):
        commlib.init(other)
    ring = commlib.new_ring(9, [0, 1], timeout=20)
    same(commlib.new_ring(9, [0, 1], timeout=20) is ring, True, "the same timeout")
    with refused(RingError, "ring 9 exists with timeout 20 s; given 5 s", "close_ring(9)"):
        commlib.new_ring(9, [0, 1], timeout=5)


@runs_on("ranks")
def test_abort(comm: Any) -> None:
    ring = commlib.new_ring(9, [0, 1])
    assert ring is not None
    ring.abort()
    with refused(RingError, "ring 9", "aborted"):
        ops.all_reduce(torch.ones(2, device=comm.device), 9)
    again = commlib.new_ring(9, [1, 0])
    same(again is ring, False, "an aborted ring is created again")
    same(gathered(again), [1, 0], "with other members, too")
    manager.close(9)
    same(gathered(commlib.new_ring(9, [0, 1])), [0, 1], "created again")
    manager.close(9, abort=True)
    comm.abort()
    same(commlib.init() is comm, False, "ring 0 is created again")
    same(gathered(commlib.comm()), [0, 1], "and works")


def stuck(comm: Any) -> None:
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


def test_close_with_a_call_that_never_ends(cpu_ranks: Ranks) -> None:
    cpu_ranks(stuck)


@runs_on("ranks")
def test_abort_beside_a_stuck_call(comm: Any) -> None:
    """abort() takes no lock: a thread that is stuck in a call, holding it, can be helped."""
    ring = commlib.new_ring(52, [0, 1])
    assert ring is not None
    with ring._lock:
        thread = threading.Thread(target=ring.abort)
        thread.start()
        thread.join(20)
        same(thread.is_alive(), False, "abort() waits for the lock")
    with refused(RingError, "aborted"):
        ring.barrier()
    manager.close(52)


def engines(comm: Any) -> None:
    """Members that come with different engines are notified at once, by name."""
    commlib.shutdown()
    begin = time.monotonic()
    with commlib.flags.override("FLAGS_dynamic_static_unified_comm", comm.rank == 0):
        with refused(EngineError, "ranks [0] on gloo (cpu)", "ranks [1] on c10d (cpu)"):
            commlib.init(device="cpu", timeout=60)
        assert time.monotonic() - begin < 20
    same(gathered(commlib.init(device="cpu")), [0, 1], "with one engine")


def test_different_engines(world: World) -> None:
    with world(2) as ranks:
        ranks(engines)
