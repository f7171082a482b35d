"""The protocol of the push kernels as messages; all that nothing orders comes in random order.

A word represents a vector and its source; a reduced one is the tuple of what it was
made of, and one that is zero is not in the dict. In a call a place has one thread that stores to
it, once, and one that waits for it, so no order between stores matters. Names are the kernels'.
"""

import heapq
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import count, islice
from random import Random
from typing import Any, ClassVar, NamedTuple, TypeAlias

Word: TypeAlias = Any  # (tag, source, index), several of them, a flag and one; None: not_numbers()
Words: TypeAlias = dict[int, Word]  # by the rank that they come from
Steps: TypeAlias = Generator[float, None, None]  # how long to wait for the next, at least
Taking: TypeAlias = Generator[float, None, Words | None]
UNITS = 2**13  # that the blocks of a call make
Fault: TypeAlias = tuple[str, str, int, int]  # reason, verb, peer, epoch (or the other call's tag)


class Violation(AssertionError):
    """The protocol has been violated."""


class Call(NamedTuple):
    """The call that the ranks agree on."""

    verb: "type[Thread]"
    tag: int
    vectors: int  # of the smaller tensor, where x and out differ
    grids: Sequence[tuple[int, int, int]]  # blocks, threads, vectors pushed ahead; by ranks in turn


class Rank:
    """One rank: its memory, what its host is given, its kernels and those that are to come."""

    def __init__(self, index: int, epoch: int) -> None:
        self.index, self.done = index, epoch * UNITS
        self.last = 0, 0  # who has signed last: tag of the call, and its number
        self.fault: Fault | None = None
        self.halves: dict[tuple[int, int], Word] = {}  # which half, where in it
        self.error: Fault | None = None
        self.running = 0  # kernels
        self.overlapped = False  # whether two were running at the same time

    @property
    def epoch(self) -> int:
        """The number of the next call, or of the present one."""
        return self.done // UNITS % 2**32


class Machine:
    """All ranks, one clock, and all that is under way."""

    def __init__(self, size: int, seed: int, epoch: int = 0, limit: float = math.inf) -> None:
        self.size, self.random, self.limit = size, Random(seed), limit
        self.reset(epoch)
        self.now, self.numbers = 0.0, count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []

    def later(self, action: Callable[[], None], wait: float = 0) -> None:
        """Let something happen soon; now and then it takes longer than all else together."""
        time = self.now + wait + self.random.paretovariate(0.75)
        heapq.heappush(self.events, (time, next(self.numbers), action))

    def run(
        self, programs: Sequence[Sequence[Call]], during: Sequence[Call] = ()
    ) -> list[list[list[Word]]]:
        """Run every rank's calls until nothing is under way, and return every rank's outputs.

        ``during``: calls that every rank makes on another stream at the same time.
        """
        self.misused = bool(during)  # words may then land on each other
        kernels = [
            [[Kernel(self, rank, call) for call in calls] for calls in (program, during)]
            for rank, program in zip(self.ranks, programs, strict=True)
        ]
        for streams in kernels:
            for stream in streams:
                self.launch(iter(stream))
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            if self.now > 1e15:  # soon, as those who wait look less and less often
                raise Violation("somebody waits in vain")
            action()
        return [[kernel.out for stream in streams for kernel in stream] for streams in kernels]

    def launch(self, stream: "Iterator[Kernel]") -> None:
        """Begin the next call of a stream, at once or late."""
        if kernel := next(stream, None):
            kernel.stream = stream
            self.later(kernel.begin, self.random.choice((0, 0, 1000)))

    def reset(self, epoch: int) -> None:
        """Make all memories zero and all epochs equal; nothing may be under way."""
        self.ranks = [Rank(index, epoch) for index in range(self.size)]


class Kernel:
    """A call on one rank; the next one begins when its threads have ended and its zeros landed."""

    def __init__(self, machine: Machine, rank: Rank, call: Call) -> None:
        self.machine, self.rank, self.call = machine, rank, call
        x, out = (call.vectors * (machine.size if wide else 1) for wide in call.verb.wide)
        self.x: list[Word] = [(call.tag, rank.index, i) for i in range(x)]
        self.out = self.x if x == out and machine.random.random() < 0.5 else [None] * out
        self.blocks, self.threads, self.ahead = call.grids[rank.index % len(call.grids)]
        if call.verb.parts:
            self.threads *= machine.size - 1
        self.stream: Iterator[Kernel] = iter(())
        self.working = [self.threads] * self.blocks  # before its last one
        self.under_way = self.grid = self.blocks * self.threads

    def begin(self) -> None:
        """Let the threads begin, in any order."""
        self.rank.running += 1
        self.rank.overlapped = self.rank.overlapped or self.rank.running > 1
        for index in range(self.grid):
            self.machine.later(partial(self.go_on, self.call.verb(self, index).run()))

    def go_on(self, steps: Steps) -> None:
        """Let a thread take a step."""
        for wait in steps:
            return self.machine.later(partial(self.go_on, steps), wait)
        return self.done()

    def done(self, zero: tuple[int, int] | None = None) -> None:
        """Count a thread that has ended, or a zero that lands."""
        if zero:
            self.rank.halves.pop(zero, None)
        self.under_way -= 1
        if not self.under_way:
            self.rank.running -= 1
            self.machine.launch(self.stream)


class Thread:
    """One thread of a call, in one hop where the verb does not say otherwise."""

    wide: ClassVar[tuple[bool, bool]] = (False, False)  # x, out: so many vectors for every rank?
    parts: ClassVar[bool] = False  # whether a part of each block serves each peer

    def __init__(self, kernel: Kernel, index: int) -> None:
        self.kernel, self.machine, self.rank = kernel, kernel.machine, kernel.rank
        self.x, self.out = kernel.x, kernel.out
        self.block, self.thread = divmod(index, kernel.threads)
        self.ranks, self.me = self.machine.size, self.rank.index
        self.peers = [(self.me + d) % self.ranks for d in range(1, self.ranks)]
        self.slice = self.vectors = kernel.call.vectors
        self.mine = range(index, self.slice, kernel.grid)

    def run(self) -> Steps:
        """Enter the call, do what the verb is about, and leave."""
        self.epoch = self.rank.epoch
        self.before = 0, 0  # the signature that the first thread of a block has replaced
        if self.given_up(self.machine.now, self.me):
            for i in self.mine:
                self.spoil(i)
            return
        yield from self.work()
        self.verify()
        self.kernel.working[self.block] -= 1
        if not self.kernel.working[self.block]:
            self.rank.done += self.units()

    def units(self) -> int:
        """Return what this block adds, so that all of a call make ``UNITS``."""
        return 1 if self.block else UNITS - self.kernel.blocks + 1

    def work(self) -> Steps:
        """Push, sign, and go on pushing ahead of what is waited for."""
        pushes = map(self.push, self.mine)
        for push in islice(pushes, self.kernel.ahead):
            yield from push
        yield from self.sign()
        for i in self.mine:
            for push in islice(pushes, 1):
                yield from push
            self.finish(i, (yield from self.take(self.peers, i)))

    def push(self, i: int) -> Steps:
        """Push vector i to all who want it."""
        for peer in self.owners(i):
            self.poke(peer, i, self.outgoing(peer, i))
            yield 0

    def owners(self, i: int) -> list[int]:
        """Return the peers in whose slices there is a vector i."""
        return self.peers

    def outgoing(self, peer: int, i: int) -> Word:
        """Return the word that a peer gets as vector i."""
        return self.x[i]

    def reduced(self, i: int, words: Words | None) -> Word:
        """Put the own word to the others, in rank order."""
        return words and tuple(words.get(r, self.outgoing(self.me, i)) for r in range(self.ranks))

    def finish(self, i: int, words: Words | None) -> None:
        """Put to out what becomes of vector i of all ranks."""
        self.out[i] = self.reduced(i, words)

    def spoil(self, i: int) -> None:
        """Leave nothing in out that could be taken for what becomes of vector i."""
        self.finish(i, None)

    def sign(self) -> Steps:
        """Let the first thread of a block leave its signature; the one before it comes later."""
        if self.thread == 0:
            self.before, self.rank.last = self.rank.last, (self.kernel.call.tag, self.epoch)
            yield 0

    def verify(self) -> None:
        """Report a call that has the same number."""
        tag, epoch = self.before
        if tag not in (0, self.kernel.call.tag) and epoch == self.epoch:
            self.raise_fault("two at once", self.me, tag)

    def slot(self, source: int, i: int, hop: int) -> tuple[int, int]:
        """Return where vector i of a source's slice is: the layout of a half is the call's."""
        return self.epoch & 1, (hop * self.ranks + source) * self.slice + i

    def poke(self, peer: int, i: int, word: Word, hop: int = 0) -> None:
        """Push a word, which lands at any time, even when this kernel has ended."""
        halves, at = self.machine.ranks[peer].halves, self.slot(self.me, i, hop)

        def land() -> None:
            if at in halves and not self.machine.misused:
                raise Violation(f"{word} of rank {self.me} lands on {halves[at]} of rank {peer}")
            halves[at] = word

        self.machine.later(land)

    def read(self, at: tuple[int, int]) -> Word:
        """Return a word and store a zero there, which lands before this kernel has ended."""
        self.kernel.under_way += 1
        self.machine.later(partial(self.kernel.done, at))
        return self.rank.halves[at]

    def take(self, sources: list[int], i: int, hop: int = 0) -> Taking:
        """Wait until vector i of all sources has come, and put the zeros back.

        A second hop waits longer: its owner may itself wait for the missing rank, and names it.
        """
        begin, patience = self.machine.now, self.machine.limit if hop else 0
        places = {source: self.slot(source, i, hop) for source in sorted(sources)}
        while missing := [source for source, at in places.items() if at not in self.rank.halves]:
            if self.given_up(begin + patience, missing[-1]):
                return None
            yield (self.machine.now - begin) / 2
        return {source: self.read(at) for source, at in places.items()}

    def given_up(self, begin: float, peer: int) -> bool:
        """Look for another call, for a fault, then at the clock."""
        self.verify()
        if not self.rank.fault and self.machine.now - begin >= self.machine.limit:
            self.raise_fault("late", peer, self.epoch)
        self.rank.error = self.rank.error or self.rank.fault
        return self.rank.fault is not None

    def raise_fault(self, reason: str, peer: int, what: int) -> None:
        """Tell the own rank at once and the others some time later; the host keeps the first."""
        fault = self.rank.fault = reason, type(self).__name__, peer, what
        self.rank.error = self.rank.error or fault
        for other in self.peers:
            self.machine.later(partial(setattr, self.machine.ranks[other], "fault", fault))


class OneShot(Thread):
    """all_reduce in one hop."""


class AllGather(Thread):
    """Any bits, zeros too, in packets in which the flag is what is not zero."""

    wide = (False, True)

    def outgoing(self, peer: int, i: int) -> Word:
        return "flag", self.x[i]

    def finish(self, i: int, words: Words | None) -> None:
        packets = self.reduced(i, words)
        for rank in range(self.ranks):
            self.out[rank * self.slice + i] = packets and packets[rank][1]


class ReduceScatter(Thread):
    """The first of two hops by itself, with a whole slice for every rank."""

    wide = (True, False)

    def outgoing(self, peer: int, i: int) -> Word:
        return self.x[peer * self.slice + i]


class TwoShot(ReduceScatter):
    """all_reduce in two hops: every rank reduces one slice and hands it on."""

    wide = (False, False)
    parts = True

    def __init__(self, kernel: Kernel, index: int) -> None:
        super().__init__(kernel, index)
        self.slice = -(-self.vectors // self.ranks)
        width = kernel.threads // len(self.peers)
        part, lane = divmod(self.thread, width)
        self.peer, self.reduces = self.peers[part], part == 0
        self.mine = range(self.block * width + lane, self.slice, kernel.blocks * width)

    def holds(self, owner: int, i: int) -> bool:
        return owner * self.slice + i < self.vectors

    def owners(self, i: int) -> list[int]:
        return [self.peer] if self.holds(self.peer, i) else []

    def spoil(self, i: int) -> None:
        for owner in (self.peer, *([self.me] if self.reduces else [])):
            if self.holds(owner, i):
                self.out[owner * self.slice + i] = None

    def work(self) -> Steps:
        for turn in range(len(self.mine) + 2 * self.kernel.ahead):
            for hop, do in enumerate((self.push, self.reduce_and_spread, self.gather)):
                at = turn - hop * self.kernel.ahead
                if 0 <= at < len(self.mine):
                    yield from do(self.mine[at])
            if turn == 0:
                yield from self.sign()

    def reduce_and_spread(self, i: int) -> Steps:
        if not self.reduces or not self.holds(self.me, i):
            return
        at = self.me * self.slice + i
        self.out[at] = self.reduced(i, (yield from self.take(self.peers, i)))
        for peer in self.peers if self.out[at] else ():
            self.poke(peer, i, self.out[at], hop=1)
            yield 0

    def gather(self, i: int) -> Steps:
        words = yield from self.take(self.owners(i), i, hop=1)
        for owner in self.owners(i):
            self.out[owner * self.slice + i] = words and words[owner]
