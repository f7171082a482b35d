"""The protocol of the expert kernels in a model: right in any order, no rule too many."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from random import Random
from typing import Any

import pytest

from tests.support.expert_model import (
    BACK,
    DISPATCH,
    PUSH,
    READY,
    ROOM,
    TAKE,
    Block,
    Call,
    Machine,
    Steps,
    least_places,
)
from tests.support.push_model import Violation

SIZES = (2, 3, 4)
SEEDS = range(60)
LIMIT = 1e12  # far more than any rank is late


def some_calls(size: int, seed: int, count: int = 8, *, masks: bool = True) -> list[Call]:
    """Draw calls: few tokens and many, even and uneven, with slots of a few sizes.

    ``masks``: at times they leave out ranks, which make the calls all the same.
    """
    random, calls = Random(seed), []
    for number in range(1, count + 1):
        wide, many = random.choice((0.1, 0.5, 1)), random.choice((1, 5, 14))
        ranks: list[list[list[int]]] = []
        for _ in range(size):
            only = random.choice((None, None, *range(size)))  # at times all tokens for one rank
            tokens = random.randint(0, many)
            ranks.append([
                [r for r in range(size) if (random.random() < wide if only is None else r == only)]
                for _ in range(tokens)
            ])  # fmt: skip
            if random.random() < 0.3:  # first the tokens for one rank, then those for another
                ranks[-1].sort(reverse=random.random() < 0.5)
        if random.random() < 0.15:  # and so that the orders of the senders are opposite
            ranks = [[[(r + 1) % size]] * ROOM + [[r]] * ROOM for r in range(size)]
        grids = [(random.choice((2, 3, 4, 9)), random.randint(1, 2)) for _ in range(size)]
        cells = random.choice((1, 2, 2, 3, 5))
        live: Sequence[int] = range(size)
        if masks and random.random() < 0.3:
            live = sorted(random.sample(live, random.randint(1, size)))
            ranks = [
                [[to for to in token if to in live] for token in tokens] if rank in live else []
                for rank, tokens in enumerate(ranks)
            ]
        places = least_places(size) + random.choice((0, 1, 3, 1000))
        kind = random.choice((DISPATCH, BACK))
        few, few_rows = (random.random() < 0.5 for _ in range(2))
        calls.append(Call(kind, number, cells, ranks, grids, live, few, few_rows, places))
    return calls


def check(machine: Machine, calls: list[Call]) -> None:
    """Run the calls on all ranks: every row must arrive, and nothing be waited for in vain."""
    machine.run([calls] * machine.size)
    for rank in machine.ranks:
        if rank.fault is not None:
            raise Violation(f"rank {rank.index} gives rank {rank.fault} up")
        expected = set()
        for call in calls:
            if call.kind == DISPATCH:
                counts = [len(call.rows(source, rank.index)) for source in range(machine.size)]
                expected |= {
                    (call.number, s, row) for s, n in enumerate(counts) for row in range(n)
                }
            else:
                tokens = enumerate(call.ranks[rank.index])
                expected |= {(call.number, r, token) for token, ranks in tokens for r in ranks}
        if expected != set(rank.results):
            raise Violation(f"rank {rank.index} lacks {expected ^ set(rank.results)}")


@pytest.mark.parametrize("size", SIZES)
def test_every_row_arrives(size: int) -> None:
    for seed in SEEDS:
        check(Machine(size, seed), some_calls(size, seed))


# -- rules that are needed -------------------------------------------------------------------------


def _flag_before_data(patch: pytest.MonkeyPatch) -> None:
    def fence(self: Block) -> Generator[float, None, None]:
        yield 0

    patch.setattr(Block, "fence", fence)


def _no_wait_for_a_free_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Block, "is_free", lambda *_: READY)


def _calls_before_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    def is_free(self: Block, to: int, index: int, last: Any) -> int:
        slot = self.word("freed", to, index)
        return READY if last is None or self.rank.memory.get(slot) == last else to

    patch.setattr(Block, "is_free", is_free)


def _one_more_call_may_be_ahead(patch: pytest.MonkeyPatch) -> None:
    def has_begun(self: Block, rank: int) -> int:
        return READY if self.rank.begun[rank] + 2 >= self.number else rank

    patch.setattr(Block, "has_begun", has_begun)


def _one_half(patch: pytest.MonkeyPatch, kind: str) -> None:
    half = Block.half

    def same(self: Block, what: str, peer: int, index: int = 0) -> tuple[Any, ...]:
        return (what, 0, peer, index) if what == kind else half(self, what, peer, index)

    patch.setattr(Block, "half", same)


def _counts_in_one_half(patch: pytest.MonkeyPatch) -> None:
    _one_half(patch, "count")


def _flags_in_one_half(patch: pytest.MonkeyPatch) -> None:
    _one_half(patch, "flag")


def _slots_in_one_half(patch: pytest.MonkeyPatch) -> None:
    _one_half(patch, "cell")


def _counts_are_sent_at_once(patch: pytest.MonkeyPatch) -> None:
    announce = Block.announce

    def at_once(self: Block) -> Steps:
        begun, self.rank.begun = self.rank.begun, [self.number] * self.machine.size
        yield from announce(self)
        self.rank.begun = begun
        return True

    patch.setattr(Block, "announce", at_once)


def _freed_before_it_is_copied(patch: pytest.MonkeyPatch) -> None:
    empty = Block.empty

    def first(self: Block, source: int, row: int, rows: int) -> Generator[float, None, None]:
        self.free(source, row % self.call.slots, row)
        yield from empty(self, source, row, rows)

    patch.setattr(Block, "empty", first)


def _last_slots_are_not_freed(patch: pytest.MonkeyPatch) -> None:
    empty = Block.empty

    def fewer(self: Block, source: int, row: int, rows: int) -> Generator[float, None, None]:
        yield from empty(self, source, row, rows - 1)

    patch.setattr(Block, "empty", fewer)


def _tokens_of_an_earlier_pass_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Block, "used", lambda *_: None)


def _passes_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Block, "has_pushed", lambda *_: READY)


def _takers_have_several_senders(patch: pytest.MonkeyPatch) -> None:
    def take_rows(self: Block, source: int) -> Steps:
        size = self.machine.size
        if not (yield from self.are_counted(range(size))):
            return False
        counts = [
            self.rank.memory[self.half("count", rank)][1] if rank in self.call.live else 0
            for rank in range(size)
        ]
        rows = [(row, s) for row in range(max(counts)) for s in range(size) if row < counts[s]]
        for item in self.items(TAKE, len(rows)):
            row, source = rows[item]
            if not (yield from self.take(source, row, counts[source])):
                return False
        return True

    patch.setattr(Block, "take_rows", take_rows)


def _pushers_have_shares_of_their_own(patch: pytest.MonkeyPatch) -> None:
    def items(self: Block, work: int, count: int) -> Iterator[int]:
        if work != PUSH:
            return claimed(self, work, count)
        first = max(0, self.index - self.machine.size - 1)
        return iter(range(first, count, self.kernel.pushers - 1))

    claimed = Block.items
    patch.setattr(Block, "items", items)


def _takers_have_shares_of_their_own(patch: pytest.MonkeyPatch) -> None:
    def items(self: Block, work: int, count: int) -> Iterator[int]:
        taker = self.taker()
        if taker is None:
            return claimed(self, work, count)
        size = self.machine.size if self.call.kind == DISPATCH else 1
        return iter(range(taker // size, count, self.kernel.takers // size))

    claimed = Block.items
    patch.setattr(Block, "items", items)


def _takers_begin_last(patch: pytest.MonkeyPatch) -> None:
    def taker(self: Block) -> int | None:
        number = self.index - self.kernel.pushers
        return number if number >= 0 else None

    patch.setattr(Block, "taker", taker)


def _takers_begin_first(patch: pytest.MonkeyPatch) -> None:
    def taker(self: Block) -> int | None:
        number = self.index - 1
        return number if 0 <= number < self.kernel.takers else None

    patch.setattr(Block, "taker", taker)


def _pushers_leave_with_shares_unclaimed(patch: pytest.MonkeyPatch) -> None:
    def claim(self: Block, work: int) -> int:
        leaves = work == PUSH and self.call.few_rows and self in pushed
        pushed.add(self)
        return 1 << 40 if leaves and self.call.kind == BACK else claimed(self, work)

    claimed, pushed = Block.claim, set[Block]()
    patch.setattr(Block, "claim", claim)


def _tags_repeat_in_every_call(patch: pytest.MonkeyPatch) -> None:
    run = Block.run

    def same(self: Block) -> Steps:
        steps = run(self)
        for wait in steps:
            self.number = 1
            yield wait
        return True

    patch.setattr(Block, "run", same)


@pytest.mark.parametrize(
    "broken",
    [
        _flag_before_data,
        _no_wait_for_a_free_slot,
        _calls_before_are_not_awaited,
        _one_more_call_may_be_ahead,
        _counts_in_one_half,
        _flags_in_one_half,
        _slots_in_one_half,
        _counts_are_sent_at_once,
        _freed_before_it_is_copied,
        _last_slots_are_not_freed,
        _tokens_of_an_earlier_pass_are_not_awaited,
        _passes_are_not_awaited,
        _takers_have_several_senders,
        _pushers_have_shares_of_their_own,
        _takers_have_shares_of_their_own,
        _takers_begin_last,
        _takers_begin_first,
        _pushers_leave_with_shares_unclaimed,
        _tags_repeat_in_every_call,
    ],
)
def test_no_rule_is_superfluous(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
) -> None:
    broken(monkeypatch)
    for seed in range(1500):
        size = SIZES[seed % len(SIZES)]
        try:
            check(Machine(size, seed), some_calls(size, seed))
        except Violation:
            return
    raise AssertionError("the model does not find it")


# -- a rank that is missing ------------------------------------------------------------------------


def blamed(size: int, seed: int, *, begins: bool) -> set[int | None]:
    """Return whom the others give up when the last rank stops before the third call, or in it."""
    calls, machine = some_calls(size, seed, masks=False), Machine(size, seed, LIMIT)
    machine.ranks[-1].stops_in = 3 if begins else 0
    machine.run([*[calls] * (size - 1), calls[: 3 if begins else 2]])
    return {rank.fault for rank in machine.ranks[:-1]}


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_missing_rank_is_named(size: int, begins: bool) -> None:
    """Nobody else is given up; a rank that needs nothing of it may end all its calls."""
    named = [blamed(size, seed, begins=begins) for seed in SEEDS]
    assert all(faults <= {None, size - 1} for faults in named)
    assert sum({size - 1} == faults for faults in named) > len(SEEDS) / 2


def blamed_by_two(seed: int) -> set[int | None]:
    """Return whom ranks 0 and 1 give up: each waits for rank 2, which stops, and for the other."""
    ranks = [[[2]] * 6 + [[1]] * 2, [[2]] * 6 + [[0]] * 2, []]
    machine = Machine(3, seed, LIMIT)
    machine.ranks[2].stops_in = 1
    machine.run([[Call(DISPATCH, 1, 5, ranks, [(2, 1)] * 3, range(3))]] * 3)
    return {rank.fault for rank in machine.ranks[:2]}


def test_ranks_that_wait_for_each_other_too() -> None:
    """Threads of a rank wait for several peers; the one that waits for nobody is named."""
    assert all(blamed_by_two(seed) <= {None, 2} for seed in SEEDS)


def test_all_that_a_rank_waits_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited = Block.awaited
    monkeypatch.setattr(Block, "awaited", lambda self, rank: awaited(self, rank)[:1])
    assert any(not blamed_by_two(seed) <= {None, 2} for seed in SEEDS)


def _silent(self: Block, peer: int) -> None:
    return


def test_a_peer_may_itself_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without notes, a rank that waits for the missing one is given up instead."""
    monkeypatch.setattr(Block, "note", _silent)
    some = ((seed, begins) for seed in range(400) for begins in (False, True))
    assert any(not blamed(3, seed, begins=begins) <= {None, 2} for seed, begins in some)


def late_and_missing(seed: int) -> set[int | None]:
    """Return whom rank 0 gives up where rank 1 waits for rank 2, too late for a note."""
    call = Call(BACK, 1, 5, [[[1]] * 3, [], [[1]]], [(2, 1)] * 3, range(3))
    machine = Machine(3, seed, LIMIT)
    machine.ranks[1].late = 0.7 * LIMIT
    machine.run([[call], [call], []])
    return {machine.ranks[0].fault}


def _the_peer_itself(self: Block, peer: int) -> int:
    return peer


def test_a_peer_may_have_begun_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that has begun the fewest calls is named, notes or not."""
    assert all(late_and_missing(seed) <= {None, 2} for seed in SEEDS)
    monkeypatch.setattr(Block, "last_to_begin", _the_peer_itself)
    assert any(late_and_missing(seed) == {1} for seed in SEEDS)


def test_the_model_has_more_rows_than_slots() -> None:
    """The drawn calls are those that matter."""
    calls = [call for seed in SEEDS for call in some_calls(3, seed)]
    most = [max(len(call.rows(a, b)) for a in range(3) for b in range(3)) for call in calls]
    full = [n > call.slots for n, call in zip(most, calls, strict=True)]
    assert 0.1 < sum(full) / len(full) < 0.9
    assert math.lcm(*{call.cells for call in calls}) > ROOM
