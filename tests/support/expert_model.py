"""The protocol of the expert kernels as messages; all that nothing orders comes in random order.

A slot is several cells, so that slots of different sizes overlap. What a cell holds says which call
and which row it is of. Names are those of experts.cuh.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Any, NamedTuple, TypeAlias

from tests.support.push_model import Violation

Steps: TypeAlias = Generator[float, None, bool]  # waits; False when a peer was given up
ROOM = 12  # cells of the slots of one pair
GROUP = 3  # sums that a block prepares together
READY = -1
DISPATCH, BACK = 0, 1
PUSH, TAKE = 0, 1  # what blocks claim items of; on the way to the experts TAKE + the sender


class Call(NamedTuple):
    """The call that the ranks agree on, and its launch on each.

    ``ranks[r][t]``: which ranks have a row of token t of rank r. A rank that is not ``live`` is
    left out by the mask: it makes the call all the same, without a row.
    """

    kind: int
    number: int  # counts all calls; a word that holds it is of this one
    cells: int  # of a slot
    ranks: Sequence[Sequence[Sequence[int]]]
    grids: Sequence[tuple[int, int]]  # pushers, two at least, and takers per sender
    live: Sequence[int]
    few: bool = True  # pushers, which begin before most takers
    few_rows: bool = False  # every pusher looks at all rows, and so knows the last pass
    places: int = 1000  # of blocks that run on a GPU at the same time, at least ``least_places``

    @property
    def slots(self) -> int:
        return ROOM // self.cells

    def rows(self, source: int, rank: int) -> list[int]:
        """Return the tokens of ``source`` that ``rank`` has rows of, in order."""
        return [token for token, ranks in enumerate(self.ranks[source]) if rank in ranks]


def least_places(size: int) -> int:
    """Return how many blocks of a kernel run at least: one that counts, takers, and a pusher."""
    return size + 2


class Rank:
    """One rank: its memory, its kernels and what its host is given."""

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.begun = [0] * size
        self.waits: dict[tuple[int, int], int] = {}  # call in which one has waited for another
        self.calls = 0
        self.memory: dict[tuple[Any, ...], Any] = {}  # counts, slots, flags, freed, used
        self.fault: int | None = None  # a peer that was given up
        self.stops_in = 0  # the call in which it stops for good; 0 for none
        self.late = 0.0  # how long its calls wait before they begin
        self.results: dict[tuple[Any, ...], Any] = {}


class Machine:
    """All ranks, one clock, and all that is under way."""

    def __init__(self, size: int, seed: int, limit: float = math.inf) -> None:
        self.size, self.random, self.limit = size, Random(seed), limit
        self.ranks = [Rank(index, size) for index in range(size)]
        self.now, self.numbers = 0.0, count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.block: type[Block] = Block

    def later(self, action: Callable[[], None], wait: float = 0) -> None:
        """Let something happen soon; now and then it takes longer than all else together."""
        time = self.now + wait + self.random.paretovariate(0.75)
        heapq.heappush(self.events, (time, next(self.numbers), action))

    def run(self, programs: Sequence[Sequence[Call]]) -> None:
        """Run every rank's calls until nothing is under way."""
        for rank, calls in zip(self.ranks, programs, strict=True):
            Kernel.launch(self, rank, iter(calls))
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            if self.now > 1e15:  # soon, as those who wait look less and less often
                raise Violation("somebody waits in vain")
            action()


class Kernel:
    """A call on one rank; the next one begins when its blocks have ended and its stores landed."""

    def __init__(self, machine: Machine, rank: Rank, call: Call, calls: Any) -> None:
        self.machine, self.rank, self.call, self.calls = machine, rank, call, calls
        pushers, takers = call.grids[rank.index]
        self.pushers, self.takers = pushers, takers * machine.size
        self.under_way = self.pushers + self.takers
        self.to_begin = iter(range(self.under_way))
        self.claims = Counter[int]()  # by work
        self.pushed = self.last_pass = 0

    @classmethod
    def launch(cls, machine: Machine, rank: Rank, calls: Any) -> None:
        """Begin the next call of a rank, at once or late."""
        call = next(calls, None)
        if call is not None:
            kernel = cls(machine, rank, call, calls)
            machine.later(kernel.begin, rank.late + machine.random.choice((0, 0, 1000)))

    def begin(self) -> None:
        """Let as many blocks begin as there are places."""
        for _ in range(self.call.places):
            self.begin_block()

    def begin_block(self) -> None:
        """Let the next block begin, if there is one."""
        index = next(self.to_begin, None)
        if index is not None:
            block = self.machine.block(self, index)
            self.machine.later(partial(self.go_on, block.run()))

    def go_on(self, steps: Steps) -> None:
        """Let a block take a step."""
        for wait in steps:
            if self.rank.stops_in == self.call.number and self.machine.random.random() < 0.2:
                self.rank.stops_in = -1
            if self.rank.stops_in < 0:
                return None
            return self.machine.later(partial(self.go_on, steps), wait)
        self.begin_block()
        return self.done()

    def done(self) -> None:
        """Count a block that has ended, or a store that has landed."""
        self.under_way -= 1
        if self.under_way:
            return
        self.rank.calls += 1
        self.launch(self.machine, self.rank, self.calls)


class Block:
    """One block of a call: it pushes, or it takes."""

    def __init__(self, kernel: Kernel, index: int) -> None:
        self.kernel, self.machine, self.rank = kernel, kernel.machine, kernel.rank
        self.call, self.index, self.me = kernel.call, index, kernel.rank.index
        self.under_way = 0  # stores

    def run(self) -> Steps:
        """Enter the call, push or take, and leave."""
        self.number = self.rank.calls + 1
        if self.rank.fault is not None:
            return False
        if self.me not in self.call.live:
            return True
        if self.index == 1:
            for rank in self.call.live:
                self.store(partial(self.begin_at, self.machine.ranks[rank]))
        taker = self.taker()
        if taker is None:
            return (yield from self.push_rows() if self.call.kind == DISPATCH else self.push_sums())
        source = taker % self.machine.size
        return (
            yield from self.take_rows(source) if self.call.kind == DISPATCH else self.take_sums()
        )

    def taker(self) -> int | None:
        """Return this block's number among takers; None for a pusher. The first ones do all."""
        size, pushers = self.machine.size, self.kernel.pushers - 1
        every, before = pushers + self.kernel.takers - size, self.index - 1 - size
        if before < 0:
            return self.index - 1 if self.index else None
        takers, more = (
            max(0, i - pushers) if self.call.few else i * (every - pushers) // every
            for i in (before, before + 1)
        )
        return size + takers if more > takers else None

    def claim(self, work: int) -> int:
        """Return the next item of a work."""
        item = self.kernel.claims[work]
        self.kernel.claims[work] += 1
        return item

    def items(self, work: int, count: int) -> Iterator[int]:
        """Claim items while there are some, each before the one before it is done."""
        item = self.claim(work)
        while item < count:
            later = self.claim(work)
            yield item
            item = later

    def begin_at(self, rank: Rank) -> None:
        rank.begun[self.me] = max(rank.begun[self.me], self.number)

    # -- memory ------------------------------------------------------------------------------------

    def store(self, action: Callable[[], None]) -> None:
        """Store something that lands at any time, but before the kernel has ended."""
        self.under_way += 1
        self.kernel.under_way += 1

        def land() -> None:
            action()
            self.under_way -= 1
            self.kernel.done()

        self.machine.later(land)

    def poke(self, rank: int, where: tuple[Any, ...], value: Any) -> None:
        """Store a word in the memory of a rank."""
        self.store(partial(self.machine.ranks[rank].memory.__setitem__, where, value))

    def fence(self) -> Generator[float, None, None]:
        """Wait until all stores so far have landed."""
        while self.under_way:
            yield 0

    def wait(self, missing: Callable[[], int]) -> Steps:
        """Wait until ``missing`` is READY and no rank; False when a rank was given up."""
        begin = self.machine.now
        while (peer := missing()) != READY:
            if self.given_up(begin, peer):
                return False
            yield (self.machine.now - begin) / 2
        return True

    def given_up(self, begin: float, peer: int) -> bool:
        """Look for a fault, then at the clock."""
        if self.rank.fault is not None:
            return True
        waited = self.machine.now - begin
        if peer == self.me or waited < self.machine.limit / 2:
            return False
        self.note(peer)
        if waited < self.machine.limit:
            return False
        self.rank.fault = late = self.furthest_back(peer)
        for rank in self.call.live:
            if rank != self.me:
                self.machine.later(partial(setattr, self.machine.ranks[rank], "fault", late))
        return True

    def note(self, peer: int) -> None:
        """Notify all ranks that this one has waited for a peer for long."""
        for rank in self.call.live:
            waits = self.machine.ranks[rank].waits
            self.store(partial(waits.__setitem__, (self.me, peer), self.number))

    def awaited(self, rank: int) -> list[int]:
        """Return the ranks that a rank waits for in its last call, as far as this one knows."""
        begun, waits = self.rank.begun, self.rank.waits
        return [peer for peer in range(len(begun)) if waits.get((rank, peer)) == begun[rank]]

    def furthest_back(self, peer: int) -> int:
        """Return one that waits for nobody, of a peer and those that it waits for at last."""
        late = self.last_to_begin(peer)
        seen, later = set[int](), {late}
        while later - seen:
            rank = min(later - seen)
            if not (ranks := self.awaited(rank)) and rank != self.me:
                return rank
            seen.add(rank)
            later.update(ranks)
        return late

    def last_to_begin(self, peer: int) -> int:
        """Return the rank whose last call is the earliest one; the peer among equals."""
        ranks = sorted(self.call.live, key=lambda rank: (self.rank.begun[rank], rank != peer))
        return ranks[0]

    # -- slots -------------------------------------------------------------------------------------

    def word(self, what: str, peer: int, index: int) -> tuple[Any, ...]:
        return what, peer, index

    def half(self, what: str, peer: int, index: int = 0) -> tuple[Any, ...]:
        """Return a place that calls have in turn: two of each."""
        return what, self.number % 2, peer, index

    def has_begun(self, rank: int) -> int:
        """Return READY where a rank has begun the call before, and so ended the one before that."""
        return READY if self.rank.begun[rank] + 1 >= self.number else rank

    def is_free(self, to: int, index: int, last: Any) -> int:
        """Return READY where a slot is free; ``last`` is the tag that it has had in this call."""
        free = last is None or self.rank.memory.get(self.word("freed", to, index)) == last
        return self.has_begun(to) if free else to

    def fill(self, rows: Mapping[int, int]) -> Generator[float, None, None]:
        """Fill the slots of ``rows``, one per rank, and raise their flags."""
        for to, row in rows.items():
            index = row % self.call.slots
            for cell in range(index * self.call.cells, (index + 1) * self.call.cells):
                self.poke(to, self.half("cell", self.me, cell), (self.call.number, self.me, row))
                yield 0
        yield from self.fence()
        for to, row in rows.items():
            index = row % self.call.slots
            self.poke(to, self.half("flag", self.me, index), (self.number, row))

    def is_raised(self, source: int, row: int) -> int:
        address = self.half("flag", source, row % self.call.slots)
        return READY if self.rank.memory.get(address) == (self.number, row) else source

    def empty(self, source: int, row: int, rows: int) -> Generator[float, None, None]:
        """Read a slot, and free it where one of the ``rows`` may need it."""
        index = row % self.call.slots
        for cell in range(index * self.call.cells, (index + 1) * self.call.cells):
            value = self.rank.memory.get(self.half("cell", source, cell))
            if value != (self.call.number, source, row):
                raise Violation(f"rank {self.me} finds {value}, not row {row} of {source}")
            yield 0
        if row + self.call.slots < rows:
            self.free(source, index, row)

    def free(self, source: int, index: int, row: int) -> None:
        self.poke(source, self.word("freed", self.me, index), (self.number, row))

    # -- to the experts ----------------------------------------------------------------------------

    def push_rows(self) -> Steps:
        """Push tokens; the first block sends the counts instead."""
        if self.index == 0:
            return (yield from self.announce()) and (yield from self.are_counted(self.call.live))
        tokens = self.call.ranks[self.me]
        for token in self.items(PUSH, len(tokens)):
            rows = {rank: sum(rank in one for one in tokens[:token]) for rank in tokens[token]}
            if not (yield from self.push_token(rows)):
                return False
        return (yield from self.are_counted(self.call.live))  # to clear the other rows

    def push_token(self, rows: Mapping[int, int]) -> Steps:
        """Wait for all slots of a token, then fill them, first the one of this rank itself."""
        for rank, row in rows.items():
            free = partial(self.is_free, rank, row % self.call.slots, self.last(row))
            if not (yield from self.wait(free)):
                return False
        for local in (True, False):
            some = {rank: row for rank, row in rows.items() if (rank == self.me) == local}
            if some:
                yield from self.fill(some)
        return True

    def announce(self) -> Steps:
        """Send the counts to all ranks, which no longer read those of an earlier call there."""
        for rank in self.call.live:
            if not (yield from self.wait(partial(self.has_begun, rank))):
                return False
        for rank in self.call.live:
            rows = len(self.call.rows(self.me, rank))
            self.poke(rank, self.half("count", self.me), (self.number, rows))
        return True

    def last(self, row: int) -> Any:
        """Return the tag of the row that had this slot before in this call."""
        return (self.number, row - self.call.slots) if row >= self.call.slots else None

    def are_counted(self, ranks: Sequence[int]) -> Steps:
        """Wait for the counts of those of some ranks that take part."""
        for rank in ranks:
            if rank in self.call.live and not (
                yield from self.wait(partial(self.is_counted, rank))
            ):
                return False
        return True

    def is_counted(self, source: int) -> int:
        word = self.rank.memory.get(self.half("count", source), (0, 0))
        if word[0] > self.number:
            raise Violation(f"the counts of rank {source} are those of a later call")
        return READY if word[0] == self.number else source

    def take_rows(self, source: int) -> Steps:
        """Take rows of one sender; offsets need the counts of the ranks before."""
        if source not in self.call.live:
            return True
        if not (yield from self.are_counted(range(source + 1))):
            return False
        rows = self.rank.memory[self.half("count", source)][1]
        for row in self.items(TAKE + source, rows):
            if not (yield from self.take(source, row, rows)):
                return False
        return True

    def take(self, source: int, row: int, rows: int) -> Steps:
        if not (yield from self.wait(partial(self.is_raised, source, row))):
            return False
        yield from self.empty(source, row, rows)
        self.rank.results[self.call.number, source, row] = True
        return True

    # -- back --------------------------------------------------------------------------------------

    def push_sums(self) -> Steps:
        """Push the sums of shares of passes."""
        every = [(s, t) for s in range(self.machine.size) for t in self.call.rows(s, self.me)]
        Random(self.call.number * 64 + self.me).shuffle(every)  # the same in all blocks
        most: float = math.inf  # the last pass, where this block knows it
        while True:
            turn, share = divmod(self.claim(PUSH), self.kernel.pushers)
            if turn > most:
                return True
            if not (yield from self.wait(partial(self.has_pushed, turn))):
                return False
            if turn > self.kernel.last_pass:
                return True
            assigned = every[share :: self.kernel.pushers]
            now = [(to, token) for to, token in assigned if token // self.call.slots == turn]
            for first in range(0, len(now), GROUP):
                if not (yield from self.push_group(now[first : first + GROUP])):
                    return False
            looked_at = every if self.call.few_rows else assigned
            last = max((token // self.call.slots for _, token in looked_at), default=0)
            if self.call.few_rows:
                most = max(turn, last)
            self.kernel.last_pass = max(self.kernel.last_pass, last)
            self.kernel.pushed += 1

    def push_group(self, sums: Sequence[tuple[int, int]]) -> Steps:
        """Wait for the slots of a few sums, then push them."""
        for to, token in sums:
            free = partial(self.is_free, to, token % self.call.slots, self.used(to, token))
            if not (yield from self.wait(free)):
                return False
        for to, token in sums:
            yield from self.fill({to: token})
            self.rank.memory[self.word("used", to, token % self.call.slots)] = self.number, token
        return True

    def used(self, to: int, token: int) -> Any:
        """Return the tag of the token that had this slot before in this call."""
        last = self.rank.memory.get(self.word("used", to, token % self.call.slots))
        return last if last is not None and last[0] == self.number else None

    def has_pushed(self, turn: int) -> int:
        """Return READY if this rank has pushed all shares of the passes before ``turn``."""
        return READY if self.kernel.pushed >= turn * self.kernel.pushers else self.me

    def take_sums(self) -> Steps:
        """Take the sums of tokens, of all ranks that have a row of them."""
        ranks = self.call.ranks[self.me]
        for token in self.items(TAKE, len(ranks)):
            for rank in sorted(ranks[token]):
                if not (yield from self.take(rank, token, len(ranks))):
                    return False
        return True
