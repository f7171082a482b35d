"""The kernels of the expert exchange in graphs, and when a peer is late, lost or left out."""

import os
import signal
from typing import Any

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
    wide,
)
from tests.support.experts import Routing, given, random_routing, tokens_of, with_weights
from tests.support.ranks import NewRanks
from tests.support.runs_on import runs_on
from tests.test_custom_allreduce import another
from tests.test_expert_channel import channel_of, check, counted

LATE_S = 5.0  # a ring must be created within it, on a busy machine too
TOKENS, TOP_K, EXPERTS, CAPACITY, WIDTH = 12, 3, 5, 9, 64


class Captured:
    """A dispatch and a combine of its rows in one graph, over tensors that tests change."""

    def __init__(self, ring: Any, **how: Any) -> None:
        self.ring, device = ring, ring.device
        self.x = torch.zeros(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
        self.ids = torch.full((TOKENS, TOP_K), -1, device=device)
        self.weights = torch.zeros(TOKENS, TOP_K, device=device)
        self.active = torch.ones(ring.size, dtype=torch.uint8, device=device)
        self.how = {"ring_id": ring.ring_id, "weights": self.weights, "active": self.active, **how}
        self.run()  # sets the channel up
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.run()

    def run(self) -> None:
        self.sent = ops.expert_dispatch(self.x, self.ids, EXPERTS, CAPACITY, **self.how)
        self.out = ops.expert_combine(self.sent.rows, self.sent.handle)

    def fill(self, routing: Routing, seed: int) -> None:
        """Give the graph this rank's part of a routing."""
        options = given(routing, self.ring)
        self.x.copy_(tokens_of(routing, WIDTH, torch.bfloat16, seed)[self.ring.rank])
        self.ids.copy_(options["expert_ids"])
        self.weights.copy_(options["weights"])

    def check(self, routing: Routing, seed: int, what: object) -> None:
        """Compare the outputs of a replay with the definition."""
        rank, every = self.ring.rank, tokens_of(routing, WIDTH, torch.bfloat16, seed)
        inputs = [wide(x) for x in every]
        rows = [routing.dispatched(inputs, owner) for owner in range(self.ring.size)]
        assert_bits_equal(self.sent.rows, rounded(rows[rank], torch.bfloat16), f"rows {what}")
        sums = rounded(routing.combined(rows, rank), torch.bfloat16)
        assert_bits_equal(self.out, sums, f"sums {what}")
        assert_bits_equal(self.sent.handle.demand, routing.tables(rank)["demand"], f"demand {what}")


def drawn(size: int, seed: int, active: Any = None) -> Routing:
    numbers = {"num_experts": EXPERTS, "capacity": CAPACITY, "top_k": TOP_K}
    return random_routing(size, seed, tokens=[TOKENS] * size, active=active, **numbers)


def replays(comm: Any, count: int) -> None:
    """Replay with another routing each time, some without a look at the results between."""
    with another(comm, 94) as ring:
        captured = Captured(ring, on_overflow="drop")
        routings = [drawn(comm.size, seed) for seed in range(20)]
        for turn in range(count):
            seed = turn * 7 % len(routings)
            captured.fill(routings[seed], seed)
            captured.graph.replay()
            if turn % 9 == 0 or turn == count - 1:
                captured.check(routings[seed], seed, f"replay {turn}")
        counted(ring, 2 + 2 * count)
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
            routing = drawn(comm.size, turn)
            captured.fill(routing, turn)
            captured.graph.replay()
            captured.check(routing, turn, turn)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                check(ring, drawn(comm.size, turn + 1), torch.float32, 32)
            torch.cuda.current_stream().wait_stream(side)


@runs_on("gpu_ranks", deadline=120)
def test_a_peer_that_misses_a_replay(comm: Any) -> None:
    """It is named on every rank; reset() repairs, and the graph stays valid."""
    channel_of(comm)  # compiles the kernels
    with another(comm, 96, timeout=LATE_S) as ring:
        captured, routing = Captured(ring, on_overflow="drop"), drawn(comm.size, 1)
        captured.fill(routing, 1)
        for _ in range(3):
            captured.graph.replay()
        captured.check(routing, 1, "before")
        ring.exchange([])
        for turn in range(2):
            if (comm.rank == 0) == (turn == 0):  # rank 1 is too late
                captured.graph.replay()
                captured.graph.replay()  # what follows the fault leaves at once
                torch.cuda.synchronize(comm.device)
            comm.exchange([])
        for floats in (captured.out, captured.sent.rows):
            assert_equal(bool(floats.isnan().all()), True, "results are NaN")
        assert_equal(captured.sent.handle.positions.unique().tolist(), [-1], "positions")
        assert_equal(captured.sent.counts.unique().tolist(), [0], "counts")
        words = "waiting for rank 1", "expert_dispatch", f"{LATE_S:g} s", "reset()"
        with raises(PeerTimeout, *words):
            ring.check()
        ring.reset()
        for turn in range(3):
            captured.fill(drawn(comm.size, turn), turn)
            captured.graph.replay()
            captured.check(drawn(comm.size, turn), turn, "after reset")
        check(ring, routing, torch.float16)
        ring.check()


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
    channel_of(comm)  # compiles the kernels
    ring = commlib.new_ring(98, range(comm.size), timeout=LATE_S)
    assert ring is not None
    captured, routing = Captured(ring, on_overflow="drop"), drawn(comm.size, 1)
    captured.fill(routing, 1)
    for turn in range(50):
        captured.graph.replay()
        if comm.rank == 1 and turn == 30:
            os.kill(os.getpid(), signal.SIGKILL)
    with raises((PeerTimeout, RingError, CommTimeout, EngineError), "rank 1"):
        settle(comm)
        ring.check()
    assert_equal(bool(captured.out.isnan().all()), True, "results are NaN")
    assert_equal(float(torch.ones(5, device=comm.device).sum()), 5.0, "the device still works")


@runs_on("gpu_ranks", deadline=120)
def test_a_rank_is_left_out_between_replays(comm: Any) -> None:
    """Rank 1 stops; the mask leaves it out without a new capture. It is back after a reset."""
    channel_of(comm)  # compiles the kernels
    with another(comm, 99, timeout=LATE_S) as ring:
        captured, routing = Captured(ring, on_overflow="drop"), drawn(comm.size, 2)
        captured.fill(routing, 2)
        captured.graph.replay()
        captured.check(routing, 2, "with all ranks")
        ring.exchange([])
        if comm.rank == 0:
            captured.active[1:] = 0
            alone = drawn(comm.size, 2, active=[True] + [False] * (comm.size - 1))
            for _ in range(5):
                captured.graph.replay()
                captured.check(alone, 2, "alone")
            captured.active.fill_(1)
        ring.check()
        ring.exchange([])
        ring.reset()
        captured.graph.replay()
        captured.check(routing, 2, "together again")
        ring.check()


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
        routing = drawn(comm.size, 3)
        captured.fill(routing, 3)
        captured.graph.replay()
        captured.check(routing, 3, "after an overflow")
