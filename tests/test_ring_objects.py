"""Collectives of Python objects on rings: data by default, code only where it is asked for."""

from typing import Any

import numpy as np
import torch

import commlib
from commlib.errors import ArgumentError, CommTimeout, MismatchError, PeerError, RingError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

ran: list[int] = []  # by objects that were restored here


class Setting:
    """A class that a program has to allow."""

    def __init__(self, x: int) -> None:
        self.x = x


def run() -> int:
    """Note that an object was restored here."""
    ran.append(1)
    return 7


class Command:
    """An object that runs code where it is restored."""

    def __reduce__(self) -> Any:
        return run, ()


def own(ring: Any) -> dict[Any, Any]:
    x = torch.arange(3.0, device=ring.device) + ring.rank
    return {"rank": ring.rank, "ids": (1, [2.5, None, True]), "text": "ä\x00", b"raw": {7}, "x": x}


def check(ring: Any, given: Any, rank: int) -> None:
    """Compare an object with the one that ``rank`` has sent, which NumPy computes."""
    x = given.pop("x")
    expected = {"rank": rank, "ids": (1, [2.5, None, True]), "text": "ä\x00", b"raw": {7}}
    assert_equal(given, expected, "plain values")
    assert_equal(x.device, ring.device, "device of a tensor")
    assert_bits_equal(x.cpu(), np.arange(3.0) + rank, "a tensor")


@runs_on("ranks")
def test_values(ring: Any) -> None:
    for pickle in (False, True):
        rows = ring.all_gather_object(own(ring), pickle=pickle)
        for rank, row in enumerate(rows):
            check(ring, row, rank)
        mine = own(ring)
        got = ring.broadcast_object(mine if ring.rank == 1 else None, root=1, pickle=pickle)
        assert_equal(got is mine, ring.rank == 1, "the root's own object")
        check(ring, got, 1)
        gathered = ring.gather_object(own(ring), root=1, pickle=pickle)
        assert_equal(gathered is None, ring.rank != 1, "elsewhere")
        for rank, row in enumerate(gathered or []):
            check(ring, row, rank)
        parts = [{"part": rank} for rank in range(ring.size)] if ring.rank == 0 else None
        assert_equal(ring.scatter_object(parts, root=0, pickle=pickle), {"part": ring.rank}, "part")
    long = "x" * (10_000 * (1 + ring.rank))
    assert_equal([len(one) for one in ring.all_gather_object(long)], [10_000, 20_000], "lengths")
    assert_equal(ring.all_gather_object(None), [None] * ring.size, "None")
    sizes = [0, 100_000]
    rows = ring.all_gather_object(b"x" * sizes[ring.rank])
    assert_equal([len(row) for row in rows], sizes, "bytes, on one rank none")


@runs_on("three_ranks")
def test_three(ring: Any) -> None:
    assert_equal(ring.all_gather_object(ring.rank), [0, 1, 2], "all_gather_object")
    assert_equal(ring.gather_object(ring.rank, root=2), [0, 1, 2] if ring.rank == 2 else None)
    objs = ["a", ("b",), ["c"]] if ring.rank == 1 else None
    assert_equal(ring.scatter_object(objs, root=1), ["a", ("b",), ["c"]][ring.rank], "scatter")


@runs_on("ranks")
def test_code_is_refused_unless_asked_for(ring: Any) -> None:
    calls: list[Any] = [
        ring.all_gather_object,
        lambda obj, **how: ring.gather_object(obj, root=0, **how),
        lambda obj, **how: ring.broadcast_object(obj, root=ring.rank, **how),
    ]
    for call in calls:
        with raises(ArgumentError, "Setting", "add_safe_globals", "ring 0", f"rank {ring.rank}"):
            call(Setting(1))
    for pickle in (False, True):
        with raises(ArgumentError, "all_gather_object", "type function can't be carried"):
            ring.all_gather_object(lambda: None, pickle=pickle)
    with raises(ArgumentError, "type int can't be carried", "torch can't read it as data"):
        ring.all_gather_object(10**1000)
    rows = ring.all_gather_object(Setting(ring.rank), pickle=True)
    assert_equal([row.x for row in rows], [0, 1], "pickle=True on every rank")
    with torch.serialization.safe_globals([Setting]):
        rows = ring.all_gather_object(Setting(ring.rank))
        assert_equal([row.x for row in rows], [0, 1], "an allowed class")


@runs_on("ranks")
def test_a_receiver_runs_no_code(ring: Any) -> None:
    """The sender asks for pickle, this rank does not: nothing of the sender's is run here."""
    if ring.rank == 1:
        ring.broadcast_object(Command(), root=1, pickle=True)
    else:
        with raises(ArgumentError, "broadcast_object on ring 0", "a received object is refused"):
            ring.broadcast_object(None, root=1)
    assert_equal(ran, [], "code that was run")
    result = ring.all_gather_object(Command(), pickle=True)
    assert_equal((result, ran), ([7, 7], [1, 1]), "with pickle=True")
    ran.clear()


@runs_on("ranks")
def test_bad_input(ring: Any) -> None:
    for root in (5, True):
        with raises(PeerError, f"root={root}"):
            ring.broadcast_object(1, root=root)
        with raises(PeerError, f"root={root}"):
            ring.gather_object(1, root=root)
        with raises(PeerError, f"root={root}"):
            ring.scatter_object([1, 2], root=root)
    for objs in (None, [1], "ab", {1, 2}):
        with raises(ArgumentError, "scatter_object on ring 0", "expected a list of 2 objects"):
            ring.scatter_object(objs, root=ring.rank)
    ring.barrier()


@runs_on("ranks")
def test_different_calls(ring: Any) -> None:
    """Members that call different things learn it, without FLAGS_comm_check, and go on."""
    first = ring.rank == 0
    calls: list[tuple[Any, Any, str]] = [
        (lambda: ring.broadcast_object(1, root=0), lambda: ring.broadcast_object(1, root=1), "=1"),
        (lambda: ring.broadcast_object(1, root=1), lambda: ring.scatter_object(0, root=0), "=0"),
        (lambda: ring.gather_object(1, root=0), lambda: ring.all_gather_object(1), "all_gather"),
        (lambda: ring.split(0), lambda: ring.all_gather_object("text"), "all_gather_object"),
        (lambda: ring.exchange([1]), lambda: ring.split(0), "split"),
    ]
    for one, other, shown in calls:
        with raises(MismatchError, "detected mismatch", f"on ring {ring.ring_id}", shown):
            one() if first else other()
        assert_equal(ring.all_gather_object(ring.rank), [0, 1], "the ring stays usable")


@runs_on("ranks")
def test_late_and_different(ring: Any) -> None:
    short = commlib.new_ring(313, ring.ranks, timeout=4)  # also of its creation
    with commlib.flags.override("FLAGS_comm_check", 2):
        compared = commlib.new_ring(314, ring.ranks)
    assert short is not None
    assert compared is not None
    with raises(MismatchError, "detected mismatch", "all_gather_object", "barrier"):
        if ring.rank == 0:
            compared.all_gather_object(1)
        else:
            compared.barrier()
    assert_equal(compared.all_gather_object(ring.rank), [0, 1], "the ring stays usable")
    if ring.rank == 0:
        with raises(CommTimeout, "all_gather_object on ring 313", "rank 1"):
            short.all_gather_object(1)
        with raises(RingError, "can't be used"):
            short.broadcast_object(1, root=0)
    ring.barrier()
    for one in (short, compared):
        commlib.close_ring(one.ring_id)
