"""ring.split: members of one color form a new ring, in the order of their keys."""

import gc
import threading
import weakref
from typing import Any

import torch

import commlib
from commlib.core.ring_ids import FIRST_ID, RingIds
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
    own = ring.split(ring.rank)
    assert_equal(own.ranks, (ring.ranks[ring.rank],), "a ring per member")
    other = own.ring_id + (1 if ring.rank == 0 else -1)
    with raises(RingError, f"not a member of ring {other}", [ring.ranks[1 - ring.rank]]):
        commlib.comm(other)
    commlib.close_ring(own.ring_id)
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
    taken = first.ring_id + 1
    alone = commlib.new_ring(taken, [ring.rank]) if ring.rank == 1 else None
    second = ring.split(0)
    assert_equal(second.ring_id, taken + 1, "the next free id")
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
    place, number = weakref.ref(first), first.ring_id
    first.close()
    del first
    second = ring.split(0, name="part")
    gc.collect()
    assert_equal(place() is None, True, "the closed ring is freed")
    assert_equal(commlib.comm("part") is second, True, "name")
    commlib.close_ring(number)  # it counts as closed
    commlib.close_ring(second.ring_id)
    ring.barrier()


@runs_on("ranks")
def test_a_member_that_does_not_call_is_named(ring: Any) -> None:
    short = commlib.new_ring(311, ring.ranks, timeout=1)
    assert short is not None
    short.barrier()
    if ring.rank == 0:
        with raises(CommTimeout, "split on ring 311", "rank 1"):
            short.split(0)
        with raises(RingError, "split on ring 311", "can't be used"):
            short.split(0)
    ring.barrier()
    commlib.close_ring(311)


def test_ids_are_agreed_while_threads_reserve_others() -> None:
    """Two rings at once: every member ends with one block per ring, and no two blocks overlap."""
    members = [RingIds() for _ in range(2)]
    members[1].agree(4, lambda values: [list(values)], lambda _: False)  # this one is ahead
    found: dict[tuple[int, str], int] = {}

    def agree(member: int, ring: str, rounds: list[Any]) -> None:
        def exchange(values: Any) -> list[list[int]]:
            row = rounds.pop(0)
            row[0][member] = list(values)
            row[1].wait(30)
            return list(row[0])

        found[member, ring] = members[member].agree(3, exchange, lambda _: False)

    threads = []
    for ring in "ab":
        rounds: list[Any] = [([[], []], threading.Barrier(2)) for _ in range(500)]
        threads += [
            threading.Thread(target=agree, args=(member, ring, list(rounds))) for member in (0, 1)
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0, "a"] == found[1, "a"]
    assert found[0, "b"] == found[1, "b"]
    assert abs(found[0, "a"] - found[0, "b"]) >= 3
    assert min(found.values()) >= FIRST_ID + 4


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
