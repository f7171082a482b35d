"""ring.split: members of one color form a new ring, in the order of their keys."""

import gc
import threading
import weakref
from typing import Any
from unittest.mock import patch

import torch

import commlib
from commlib.core.rings.ids import FIRST_ID, RingNumbers, ring_id
from commlib.errors import ArgumentError, CommTimeout, MismatchError, RingError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on


def sums(ring: Any, values: list[float]) -> None:
    """Check a ring's collective and the order of its members: ``values`` are what they hold."""
    x = torch.tensor([values[ring.rank]], device=ring.device)
    assert_bits_equal(ring.all_reduce(x).cpu(), torch.tensor([sum(values)]), "all_reduce")
    gathered = ring.all_gather(x).cpu()
    assert_bits_equal(gathered, torch.tensor(values), "order of the members")


@runs_on("ranks")
def test_keys_order_the_members(ring: Any) -> None:
    backwards = ring.split(3, -ring.rank)
    assert_equal(backwards.ranks, tuple(reversed(ring.ranks)), "ranks")
    assert_equal((backwards.device, backwards.timeout), (ring.device, ring.timeout), "as the ring")
    sums(backwards, [10.0 + rank for rank in backwards.ranks])
    same = ring.split(0, timeout=ring.timeout / 2, name="same")
    assert_equal((same.ranks, same.timeout), (ring.ranks, ring.timeout / 2), "ranks, timeout")
    assert_equal(commlib.comm("same") is same, True, "name")
    numbers = [backwards.ring_id, same.ring_id]
    assert_equal(numbers[1] > numbers[0] >= FIRST_ID, True, f"ids {numbers}")
    assert_equal(ring.exchange(numbers), [numbers] * ring.size, "ids on all members")
    again = backwards.split(5)
    sums(again, [float(rank) for rank in backwards.ranks])
    for one in (backwards, same, again):
        commlib.close_ring(one.ring_id)


@runs_on("ranks")
def test_colors(ring: Any) -> None:
    solo = ring.split(ring.rank)
    assert_equal(solo.ranks, (ring.ranks[ring.rank],), "a ring per member")
    [other] = [row[0] for row in ring.exchange([solo.ring_id]) if row[0] != solo.ring_id]
    with raises(RingError, f"not a member of ring {other}", [ring.ranks[1 - ring.rank]]):
        commlib.comm(other)
    commlib.close_ring(solo.ring_id)
    some = ring.split(0 if ring.rank == 1 else None, key=7)
    assert_equal(some is None, ring.rank == 0, "a member without a color")
    if some is not None:
        commlib.close_ring(some.ring_id)
    assert_equal(ring.split(None), None, "no member has a color")
    ring.barrier()


@runs_on("three_ranks")
def test_two_of_three(ring: Any) -> None:
    part = ring.split(ring.rank % 2, ring.size - ring.rank)
    expected = (1,) if ring.rank == 1 else (2, 0)
    assert_equal(part.ranks, expected, "ranks")
    sums(part, [float(rank) for rank in expected])
    alone = part.split(part.rank)
    sums(alone, [float(ring.rank)])
    for one in (part, alone):
        commlib.close_ring(one.ring_id)
    ring.barrier()


@runs_on("ranks")
def test_ids_of_the_program_are_left_out(ring: Any) -> None:
    """An id that is in use on one member alone is used by none."""
    first = ring.split(0)
    taken = first.ring_id + ring.size * 2  # rank 0 draws one number for "ids", and the next is this
    alone = commlib.new_ring(taken, [ring.rank]) if ring.rank == 1 else None
    second = ring.split(0)
    assert_equal(second.ring_id, taken + ring.size, "the next free id")
    for one in (first, second, alone):
        if one is not None:
            commlib.close_ring(one.ring_id)


@runs_on("ranks")
def test_bad_input(ring: Any) -> None:
    for color in (-1, 1.5, "red", True, 2**63, torch.tensor([1, 2])):
        with raises(ArgumentError, "split on ring 0", "color=", "or None to join no new ring"):
            ring.split(color)
    for key in (None, 0.5, 2**63):
        with raises(ArgumentError, f"key={key!r}", "expected a whole number of 64 bits"):
            ring.split(0, key)
    with raises(ArgumentError, "timeout=-1"):
        ring.split(0, timeout=-1)
    ring.barrier()


@runs_on("ranks")
def test_closed_rings_are_not_kept(ring: Any) -> None:
    """The next ring takes the name of a closed one, and its place in memory."""
    first = ring.split(0, name="part")
    ref, number = weakref.ref(first), first.ring_id
    first.close()
    del first
    second = ring.split(0, name="part")
    gc.collect()
    assert_equal(ref() is None, True, "the closed ring is freed")
    assert_equal(commlib.comm("part") is second, True, "name")
    commlib.close_ring(number)  # it counts as closed
    commlib.close_ring(second.ring_id)
    ring.barrier()


@runs_on("ranks")
def test_a_member_that_does_not_call_is_named(ring: Any) -> None:
    short = commlib.new_ring(311, ring.ranks, timeout=4)  # also of its creation
    assert short is not None
    ring.barrier()
    if ring.rank == 0:
        with raises(CommTimeout, "split on ring 311", "rank 1"):
            short.split(0)
        with raises(RingError, "split on ring 311", "can't be used"):
            short.split(0)
    ring.barrier()
    commlib.close_ring(311)


def test_ids_of_ranks_and_numbers() -> None:
    """Every rank of a job can draw at any time: no two draws are the id of one ring."""
    drawn = [RingNumbers() for _ in range(3)]
    ids = [ring_id(drawn[rank].draw(), rank, 3) for rank in (2, 0, 0, 1, 2, 1, 0, 2, 2)]
    assert len(set(ids)) == len(ids)
    assert min(ids) == FIRST_ID


@runs_on("ranks")
def test_two_rings_are_split_at_once(ring: Any) -> None:
    """Threads do not disturb each other: each split takes two exchanges, whatever others do."""
    other = commlib.new_ring(313, ring.ranks)
    made: dict[int, list[int]] = {0: [], 313: []}
    exchanges: list[str] = []

    def split_often(parent: Any) -> None:
        exchange = parent._hosts.exchange

        def counted(*given: Any) -> Any:
            exchanges.append(given[1])
            return exchange(*given)

        with patch.object(parent._hosts, "exchange", counted):
            made[parent.ring_id] += [parent.split(parent.rank).ring_id for _ in range(20)]

    threads = [threading.Thread(target=split_often, args=[one]) for one in (ring, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    rows = ring.exchange([*made[0], *made[313]])
    assert_equal(len({one for row in rows for one in row}), 80, "different ids")
    assert_equal(len(exchanges), 80, "exchanges")
    for one in (*made[0], *made[313], 313):
        commlib.close_ring(one)


@runs_on("ranks")
def test_the_remedy_of_a_failed_ring_is_the_call_that_made_it(ring: Any) -> None:
    manager = commlib.CommContextManager.instance()
    again = "call commlib.comm(0).split(...) on all of its members"
    part, create = ring.split(0), manager.create
    part.abort()
    with raises(RingError, f"call commlib.close_ring({part.ring_id}), then {again[5:]}"):
        part.barrier()

    def late(*given: Any, **place: Any) -> Any:
        if ring.rank == 0:
            return create(*given, **place)
        raise KeyboardInterrupt

    with patch.object(manager, "create", late):
        if ring.rank == 0:
            with raises(CommTimeout, "waiting for ranks [1] to join", again):
                ring.split(0, timeout=2)
        else:
            with raises(KeyboardInterrupt, ""):
                ring.split(0, timeout=2)
    ring.barrier()


@runs_on("ranks")
def test_compared_calls(ring: Any) -> None:
    with commlib.flags.override("FLAGS_comm_check", 2):
        compared = commlib.new_ring(312, ring.ranks)
    assert compared is not None
    with raises(MismatchError, "detected mismatch", "split", "barrier"):
        (compared.split(0) if ring.rank == 0 else compared.barrier())
    part = compared.split(ring.rank)
    assert_equal(part is not None and part.size, 1, "the ring stays usable")
    if part is not None:
        commlib.close_ring(part.ring_id)
    commlib.close_ring(312)
