"""The kernels of the expert exchange in graphs, and when a peer is late, lost or left out."""

import os
import signal
from typing import Any, NamedTuple

import torch

import commlib
from commlib import ops
from commlib.errors import CapacityError, CommTimeout, EngineError, PeerTimeout, RingError
from tests.support.checks import (
    assert_bits_equal,
    assert_equal,
    raises,
    rounded,
    sample,
    settle,
    until,
    wide,
)
from tests.support.experts import (
    Routing,
    differing_bytes,
    given,
    random_routing,
    tokens_of,
    with_weights,
)
from tests.support.operator import calls
from tests.support.ranks import NewRanks
from tests.support.runs_on import runs_on
from tests.test_custom_allreduce import another
from tests.test_expert_channel import LAUNCHES, channel_of, check, counted

LATE_S = 5.0  # a ring must be created within it, on a busy machine too
PAUSE = 3_000_000_000  # cycles, at least 1.5 s
TOKENS, TOP_K, EXPERTS, CAPACITY, WIDTH = 12, 3, 5, 9, 64
Mask = tuple[bool, ...] | None


class Captured:
    """A dispatch and a combine of its rows in one graph, over tensors that tests change."""

    def __init__(self, ring: Any, pause: int = 0, **how: Any) -> None:
        """``pause``: cycles that the graph sleeps between the two calls."""
        self.ring, device = ring, ring.device
        self.x = torch.zeros(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
        self.ids = torch.full((TOKENS, TOP_K), -1, device=device)
        self.weights = torch.zeros(TOKENS, TOP_K, device=device)
        self.active = torch.ones(ring.size, dtype=torch.uint8, device=device)
        self.paused = torch.zeros(1, device=device)  # runs that have begun a pause
        self.seen_paused = torch.zeros(1, pin_memory=True)
        self.how = {"ring_id": ring.ring_id, "weights": self.weights, "active": self.active, **how}
        self.run()  # sets the channel up
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.run(pause)
        self.replays = 0
        self._cases: dict[Any, Case] = {}

    def run(self, pause: int = 0) -> None:
        self.sent = ops.expert_dispatch(self.x, self.ids, EXPERTS, CAPACITY, **self.how)
        if pause:
            self.seen_paused.copy_(self.paused.add_(1), non_blocking=True)
            torch.cuda._sleep(pause)
        self.out = ops.expert_combine(self.sent.rows, self.sent.handle)

    def case(self, seed: int, active: Mask = None) -> "Case":
        """Return what the graph is given and what it must give, on the device; made once."""
        key = seed, active
        if key not in self._cases:
            self._cases[key] = case(self.ring, drawn(self.ring.size, seed, active), seed)
        return self._cases[key]

    def replay(self, seed: int, active: Mask = None) -> None:
        """Give the graph this rank's part of a routing, and replay it; the host does not wait."""
        static = self.x, self.ids, self.weights
        for held, fresh in zip(static, self.case(seed, active).given, strict=True):
            held.copy_(fresh)
        self.graph.replay()
        self.replays += 1

    def results(self) -> list[torch.Tensor]:
        return [self.sent.rows, self.out, self.sent.handle.demand]

    def check(self, seed: int, what: object, active: Mask = None) -> None:
        """Compare the outputs of a replay with the definition."""
        names, expected = ("rows", "sums", "demand"), self.case(seed, active).expected
        for name, one, other in zip(names, self.results(), expected, strict=True):
            assert_bits_equal(one, other.cpu(), f"{name} {what}")

    def check_replays(self, eager: int = 0) -> None:
        """Check that kernels have carried all replays, and which calls the host has launched."""
        counted(self.ring, 2 + eager + 2 * self.replays)
        assert_equal(calls(self.ring), 4 + eager, "launched: 2 eager calls, 2 captured, others")


class Case(NamedTuple):
    """This rank's tensors of a routing, and the results by definition."""

    given: list[torch.Tensor]
    expected: list[torch.Tensor]


def case(ring: Any, routing: Routing, seed: int) -> Case:
    rank, every = ring.rank, tokens_of(routing, WIDTH, torch.bfloat16, seed)
    options, inputs = given(routing, ring), [wide(x) for x in every]
    rows = [routing.dispatched(inputs, owner) for owner in range(ring.size)]
    sums = rounded(routing.combined(rows, rank), torch.bfloat16)
    demand = torch.from_numpy(routing.tables(rank)["demand"])
    expected = [rounded(rows[rank], torch.bfloat16), sums, demand]
    values = [every[rank], options["expert_ids"], options["weights"]]
    return Case([x.to(ring.device) for x in values], [x.to(ring.device) for x in expected])


def drawn(size: int, seed: int, active: Mask = None) -> Routing:
    numbers = {"num_experts": EXPERTS, "capacity": CAPACITY, "top_k": TOP_K}
    return random_routing(size, seed, tokens=[TOKENS] * size, active=active, **numbers)


def replays(comm: Any, count: int) -> None:
    """Replay with another routing each time. The device compares all, the host looks at few."""
    with another(comm, 94) as ring:
        captured = Captured(ring, on_overflow="drop")
        wrong = torch.zeros(count, dtype=torch.int64, device=ring.device)
        for turn in range(count):
            seed = turn * 7 % 20
            captured.replay(seed)
            wrong[turn] = differing_bytes(captured.results(), captured.case(seed).expected)
            if turn % 99 == 0:
                captured.check(seed, f"replay {turn}")
        assert_equal(wrong.nonzero().flatten().tolist(), [], "replays with another result")
        captured.check_replays()
        ring.check()


@runs_on("gpu_ranks", deadline=300)
def test_a_thousand_replays(comm: Any) -> None:
    replays(comm, 1000)


def test_replays_of_more_ranks(new_gpu_ranks: NewRanks) -> None:
    with new_gpu_ranks(3) as ranks:
        ranks(replays, 100, deadline=200)


@runs_on("gpu_ranks", deadline=120)
def test_calls_on_several_streams(comm: Any) -> None:
    """Eager calls on two streams and replays in between keep their order."""
    with another(comm, 95) as ring:
        captured, side = Captured(ring, on_overflow="drop"), torch.cuda.Stream(ring.device)
        for turn in range(8):
            captured.replay(turn)
            captured.check(turn, turn)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                check(ring, drawn(comm.size, turn + 1), torch.float32, 32)
            torch.cuda.current_stream().wait_stream(side)
        captured.check_replays(8 * LAUNCHES)


def missed_replay(comm: Any) -> None:
    """The last rank is named on every rank; reset() repairs, and the graph stays valid."""
    channel_of(comm)  # compiles the kernels
    late = comm.size - 1
    with another(comm, 96, timeout=LATE_S) as ring:
        captured = Captured(ring, on_overflow="drop")
        for _ in range(3):
            captured.replay(1)
        captured.check(1, "before")
        captured.check_replays()
        ring.exchange([])
        for turn in range(2):
            if (comm.rank != late) == (turn == 0):
                captured.replay(1)
                captured.replay(1)  # what follows the fault leaves at once
                torch.cuda.synchronize(comm.device)
            comm.exchange([])
        for floats in (captured.out, captured.sent.rows):
            assert_equal(bool(floats.isnan().all()), True, "results are NaN")
        assert_equal(captured.sent.handle.positions.unique().tolist(), [-1], "positions")
        assert_equal(captured.sent.counts.unique().tolist(), [0], "counts")
        words = f"waiting for rank {late}", "expert_dispatch", f"{LATE_S:g} s", "reset()"
        with raises(PeerTimeout, *words):
            ring.check()
        ring.reset()
        for turn in range(3):
            captured.replay(turn)
            captured.check(turn, "after reset")
        check(ring, drawn(comm.size, 1), torch.float16)
        counted(ring, 2 * 3 + LAUNCHES)  # since the reset
        ring.check()


@runs_on("gpu_ranks", deadline=120)
def test_a_peer_that_misses_a_replay(comm: Any) -> None:
    missed_replay(comm)


def test_a_peer_of_more_ranks_misses_a_replay(new_gpu_ranks: NewRanks) -> None:
    """Both others wait for it, and neither names the other one."""
    with new_gpu_ranks(3) as ranks:
        ranks(missed_replay, deadline=200)


@runs_on("gpu_ranks", deadline=120)
def test_a_peer_that_misses_a_combine(comm: Any) -> None:
    """The peer stops between the two calls: its sums are missing, and it is named."""
    channel_of(comm)  # compiles the kernels
    with another(comm, 97, timeout=LATE_S) as ring:
        experts = 4 * comm.size
        every = [[[*range(experts)]] * 3 for _ in range(comm.size)]
        routing = with_weights(Routing(experts, 99, every, experts))
        x = tokens_of(routing, WIDTH, torch.float32)[comm.rank].to(comm.device)
        sent = ops.expert_dispatch(x, **given(routing, comm, ring_id=97))
        ops.expert_combine(sent.rows, sent.handle)  # the first one, where the hosts meet
        for turn in range(2):
            if (comm.rank == 0) == (turn == 0):  # rank 1 is too late
                out = ops.expert_combine(sent.rows, sent.handle)
                torch.cuda.synchronize(comm.device)
                assert_equal(bool(out.isnan().all()), True, "results are NaN")
            comm.exchange([])
        with raises(PeerTimeout, "waiting for rank 1", "expert_combine"):
            ring.check()
        ring.reset()
        check(ring, routing, torch.float32)


@runs_on("gpu_ranks", lost=frozenset([1]), deadline=120)
def test_a_peer_killed_in_a_replay(comm: Any) -> None:
    """It dies while its graph sleeps between the two calls: its sums are missing."""
    channel_of(comm)  # compiles the kernels
    ring = commlib.new_ring(98, range(comm.size), timeout=LATE_S)
    assert ring is not None
    captured, channel = Captured(ring, PAUSE, on_overflow="drop"), channel_of(ring)
    captured.replay(1)
    captured.check(1, "before")
    ring.exchange([])
    captured.replay(1)
    if comm.rank == 1:
        until(lambda: captured.seen_paused.item() == 2, "the dispatch has ended")
        os.kill(os.getpid(), signal.SIGKILL)
    captured.replay(1)  # what follows the fault leaves at once
    settle(comm)
    with raises(PeerTimeout, "waiting for rank 1", "expert_combine"):
        channel.check()
    with raises((PeerTimeout, RingError, CommTimeout, EngineError), "rank 1"):
        ring.check()
    assert_equal(bool(captured.out.isnan().all()), True, "results are NaN")
    assert_equal(float(torch.ones(5, device=comm.device).sum()), 5.0, "the device still works")
    commlib.shutdown(abort=True)  # a barrier of ring 0 would never end


@runs_on("gpu_ranks", deadline=120)
def test_a_rank_is_left_out_between_replays(comm: Any) -> None:
    """Rank 1 stops; the mask leaves it out without a new capture. It is back after a reset."""
    channel_of(comm)  # compiles the kernels
    with another(comm, 99, timeout=LATE_S) as ring:
        captured = Captured(ring, on_overflow="drop")
        captured.replay(2)
        captured.check(2, "with all ranks")
        ring.exchange([])
        if comm.rank == 0:
            captured.active[1:] = 0
            alone = (True, *[False] * (comm.size - 1))
            for _ in range(5):
                captured.replay(2, alone)
                captured.check(2, "alone", alone)
            captured.active.fill_(1)
        captured.check_replays()
        ring.check()
        ring.exchange([])
        ring.reset()
        captured.replay(2)
        captured.check(2, "together again")
        counted(ring, 2)  # since the reset
        ring.check()


def changing_masks(comm: Any) -> None:
    """Ranks that make every replay are left out of some: they are back without a reset."""
    with another(comm, 101) as ring:
        captured, every = Captured(ring, on_overflow="drop"), range(comm.size)
        masks = [tuple(rank != turn / 2 for rank in every) for turn in range(-1, 2 * comm.size - 1)]
        tensors = [torch.tensor(mask, dtype=torch.uint8, device=ring.device) for mask in masks]
        wrong = torch.zeros(150, dtype=torch.int64, device=ring.device)
        for turn in range(len(wrong)):
            number, seed = turn % len(masks), turn % 9  # every second replay has all ranks
            captured.active.copy_(tensors[number])
            captured.replay(seed, masks[number])
            expected = captured.case(seed, masks[number]).expected
            wrong[turn] = differing_bytes(captured.results(), expected)
        assert_equal(wrong.nonzero().flatten().tolist(), [], "replays with another result")
        captured.check_replays()
        ring.check()


@runs_on("gpu_ranks", deadline=120)
def test_masks_that_change_at_each_replay(comm: Any) -> None:
    changing_masks(comm)


def test_masks_of_more_ranks(new_gpu_ranks: NewRanks) -> None:
    with new_gpu_ranks(3) as ranks:
        ranks(changing_masks, deadline=200)


@runs_on("gpu_ranks", deadline=120)
def test_overflow_is_reported_once(comm: Any) -> None:
    """Choices beyond the capacity are an error of the next check on every rank, once."""
    with another(comm, 100) as ring:
        captured = Captured(ring, on_overflow="error")
        captured.ids.copy_(torch.tensor([1, 2, -1]).expand(TOKENS, TOP_K))
        captured.graph.replay()
        torch.cuda.synchronize(comm.device)
        senders = [f"{TOKENS} from rank {rank}" for rank in range(comm.size)]
        words = ("expert 1 of rank 0", f"got {comm.size * TOKENS} rows", *senders, "capacity=9")
        with raises(CapacityError, *words):
            ring.check()
        ring.check()
        captured.graph.replay()
        torch.cuda.synchronize(comm.device)
        x = sample(comm.rank, (TOKENS, WIDTH), torch.float32).to(comm.device)
        with raises(CapacityError, *words):  # after its launch: the ranks stay in step
            ops.expert_dispatch(x, captured.ids, EXPERTS, 30, ring_id=100)
        captured.replay(3)
        captured.check(3, "after an overflow")
        counted(ring, 2 + 2 * 3 + 1)
