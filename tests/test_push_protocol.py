"""The protocol of the push kernels in a model of them: right in any order, no rule too many."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from random import Random

import pytest

from tests.support.push_model import (
    UNITS,
    AllGather,
    Call,
    Machine,
    OneShot,
    ReduceScatter,
    Taking,
    Thread,
    TwoShot,
    Violation,
    Word,
    Words,
)

Verb = type[Thread]
VERBS: tuple[Verb, ...] = (OneShot, TwoShot, AllGather, ReduceScatter)
SIZES = (2, 3, 4, 8)
SEEDS = range(30)
LIMIT = 1e12  # far more than any rank is late


class Broadcast(Thread):
    """What the protocol has no place for: the first rank pushes, and waits for nobody."""

    def owners(self, i: int) -> list[int]:
        return [] if self.me == 0 else self.peers

    def take(self, sources: list[int], i: int, hop: int = 0) -> Taking:
        return (yield from super().take([] if self.me == 0 else [0], i))

    def finish(self, i: int, words: Words | None) -> None:
        self.out[i] = words[0] if words else self.x[i]


def _reduced(call: Call, size: int, first: int = 0) -> list[Word]:
    indices = range(first, first + call.vectors)
    return [tuple((call.tag, source, i) for source in range(size)) for i in indices]


def _copies(call: Call, sources: int) -> list[Word]:
    return [(call.tag, source, i) for source in range(sources) for i in range(call.vectors)]


EXPECTED: dict[Verb, Callable[[Call, int, int], list[Word]]] = {
    OneShot: lambda call, size, rank: _reduced(call, size),
    TwoShot: lambda call, size, rank: _reduced(call, size),
    ReduceScatter: lambda call, size, rank: _reduced(call, size, rank * call.vectors),
    AllGather: lambda call, size, rank: _copies(call, size),
    Broadcast: lambda call, size, rank: _copies(call, 1),
}


def expected(call: Call, size: int, rank: int) -> list[Word]:
    return EXPECTED[call.verb](call, size, rank)


def some_calls(
    seed: int, count: int = 8, verbs: Sequence[Verb] = VERBS, grids: int = 8
) -> list[Call]:
    random = Random(seed)
    tags = random.sample(range(1, 1000), count)
    shapes = [*product((1, 2, 3), repeat=3)]
    return [
        Call(random.choice(verbs), tag, random.randint(1, 12), random.choices(shapes, k=grids))
        for tag in tags
    ]


def check(machine: Machine, calls: list[Call]) -> None:
    """Run the calls on all ranks; each result must be right, and nothing be left over."""
    epoch = (machine.ranks[0].epoch + len(calls)) % 2**32
    outputs = machine.run([calls] * machine.size)
    for rank in machine.ranks:
        for call, output in zip(calls, outputs[rank.index], strict=True):
            if output != expected(call, machine.size, rank.index):
                raise Violation(f"{call} gives rank {rank.index} {output}")
        if rank.halves or rank.error or rank.fault or rank.done % UNITS:
            raise Violation(f"left over: {vars(rank)}")
        if rank.epoch != epoch:
            raise Violation(f"rank {rank.index} is in epoch {rank.epoch}, not {epoch}")


def violated(size: int, calls_of: Callable[[int], list[Call]] = some_calls) -> bool:
    """Tell whether the model finds what is wrong, in one run at least."""
    for seed in SEEDS:
        try:
            check(Machine(size, seed), calls_of(seed))
        except Violation:
            return True
    return False


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(80))
def test_every_rank_gets_the_right_words(size: int, seed: int) -> None:
    check(Machine(size, seed), some_calls(seed))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", SIZES)
def test_one_verb_by_itself(size: int, verb: Verb) -> None:
    for seed in range(4):
        check(Machine(size, seed), some_calls(seed, verbs=(verb,)))


@pytest.mark.parametrize("size", SIZES)
def test_the_epoch_wraps(size: int) -> None:
    for seed in range(4):
        check(Machine(size, seed, epoch=2**32 - 8), some_calls(seed, 16))


def _one_half(patch: pytest.MonkeyPatch) -> None:
    slot = Thread.slot
    patch.setattr(Thread, "slot", lambda *given: (0, slot(*given)[1]))


def _nothing_is_put_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Thread, "read", lambda self, at: self.rank.halves[at])


def _zeros_outlive_the_kernel(patch: pytest.MonkeyPatch) -> None:
    def read(self: Thread, at: tuple[int, int]) -> Word:
        self.machine.later(lambda: self.rank.halves.pop(at, None))
        return self.rank.halves[at]

    patch.setattr(Thread, "read", read)


def _each_block_moves_the_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Thread, "units", lambda self: UNITS)


@pytest.mark.parametrize(
    "broken",
    [_one_half, _nothing_is_put_back, _zeros_outlive_the_kernel, _each_block_moves_the_epoch],
)
@pytest.mark.parametrize("size", SIZES)
def test_without_this_rule_it_goes_wrong(
    size: int, broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert violated(size)


@pytest.mark.parametrize("size", SIZES)
def test_a_root_that_waits_for_nobody_would_break_it(size: int) -> None:
    assert violated(size, lambda seed: some_calls(seed, verbs=(*VERBS, Broadcast)))


@pytest.mark.parametrize("size", SIZES)
def test_a_call_without_vectors_would_break_it(size: int) -> None:
    def some_empty(seed: int) -> list[Call]:
        calls = some_calls(seed)
        return [call._replace(vectors=call.vectors * (i % 2)) for i, call in enumerate(calls)]

    assert violated(size, some_empty)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_never_comes(size: int, verb: Verb, seed: int) -> None:
    random = Random(seed)
    missing, late = random.randrange(size), random.randrange(6)
    calls = some_calls(seed, grids=1)
    calls[late] = calls[late]._replace(verb=verb)
    machine = Machine(size, seed, limit=LIMIT)
    outputs = machine.run([calls[: late if rank == missing else None] for rank in range(size)])
    words = [dict(rank.halves) for rank in machine.ranks]
    present = [rank for rank in machine.ranks if rank.index != missing]
    for rank in present:
        assert rank.error == ("late", verb.__name__, missing, late)
        assert rank.epoch in (late, late + 1)
        assert all(parity == late & 1 for parity, _ in rank.halves)
        assert None in outputs[rank.index][late]
        assert not any(map(any, outputs[rank.index][late + 1 :]))
    # It finds the fault when it comes at last.
    outputs = machine.run([calls[late:] if rank == missing else [] for rank in range(size)])
    assert not any(map(any, outputs[missing]))
    assert machine.ranks[missing].error in [rank.error for rank in present]
    assert [rank.halves for rank in machine.ranks] == words
    machine.reset(late)
    check(machine, some_calls(seed + 1))


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_comes_when_the_others_give_up(size: int) -> None:
    """No wrong result passes for a right one, and its rank gets the reason."""
    faults = set()
    for seed in SEEDS:
        machine, calls = Machine(size, seed, limit=20_000 * size), some_calls(seed)
        outputs = machine.run([calls] * size)
        for rank in machine.ranks:
            for call, output in zip(calls, outputs[rank.index], strict=True):
                wanted = expected(call, size, rank.index)
                assert output == wanted or rank.error
                assert all(x in (None, y) for x, y in zip(output, wanted, strict=True))
        faults.add(any(rank.fault for rank in machine.ranks))
        machine.reset(seed)
        machine.limit = LIMIT
        check(machine, some_calls(seed + 1))
    assert faults == {False, True}


def at_once(size: int, seeds: range) -> Counter[str]:
    """Count how runs end in which a rank makes two calls of one ring at the same time."""
    ends: Counter[str] = Counter()
    for seed in seeds:
        machine, (one, other) = Machine(size, seed, limit=LIMIT), some_calls(seed, 2)
        outputs = machine.run([[one]] * size, [other])
        if not any(rank.overlapped for rank in machine.ranks):
            continue
        reasons = {rank.error[0] for rank in machine.ranks if rank.error}
        right = all(
            output == expected(call, size, rank)
            for rank in range(size)
            for call, output in zip((one, other), outputs[rank], strict=True)
        )
        ends.update(reasons or {"right" if right else "silently wrong"})
    return ends


@pytest.mark.parametrize("size", SIZES)
def test_two_streams_at_once(size: int) -> None:
    """Two calls of one ring at the same time are reported as such, or do no harm."""
    ends = at_once(size, range(60))
    assert ends["two at once"] > 20
    assert set(ends) <= {"two at once", "right"}


def _no_signature_is_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Thread, "verify", lambda self: None)


def _one_block_signs(patch: pytest.MonkeyPatch) -> None:
    sign = Thread.sign
    patch.setattr(Thread, "sign", lambda self: iter(()) if self.block else sign(self))


@pytest.mark.parametrize("broken", [_no_signature_is_looked_at, _one_block_signs])
def test_two_streams_are_not_noticed_without(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer would be named that is not late, or a wrong result pass for a right one."""
    broken(monkeypatch)
    assert set(at_once(2, range(200))) & {"late", "silently wrong"}
