"""Benchmark `capture`: captured functions against eager ones and graphs made by torch's means."""

import gc
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

import commlib
from commlib import CommContext, graph
from commlib.tools.bench.capture_work import (
    BATCH,
    EAGER,
    FEATURES,
    LARGE_BYTES,
    LAYERS,
    SIDE,
    TENSORS,
    Call,
    Counter,
    Large,
    Passes,
    Update,
    by_hand,
    captured,
    check,
)
from commlib.tools.bench.launch import launch
from commlib.tools.bench.machine import gpu_refusal
from commlib.tools.bench.pair import TIMEOUT
from commlib.tools.bench.report import Report, Row, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, interleave, race, ratio, spread

ROUNDS = 20
OURS, BARE, GRAPHED = "graph.capture", "CUDAGraph by hand", "make_graphed_callables"
LENT = 'graph.capture, gradients="borrow"'
ADDED = 'graph.capture, gradients="accumulate"'
HOST, WALL, RESERVED = "host time, µs", "wall time, µs", "reserved, MiB"
UNITS = {HOST: 1e6, WALL: 1e6, RESERVED: 2**-20}  # in a second, in a byte
UPDATE_BURST, TINY_BURST = 10, 200  # calls of a turn: fewer than the launches a GPU's queue holds
WALL_CALLS = 20  # in a row in a turn
FUNCTIONS = 8  # of memory
CAPTION = (
    "Captured functions on {nproc} GPUs, one a rank, flag on, every peer in the same processes, "
    "each with the bits of eager calls. host time: of one call on rank 0, "
    f"{UPDATE_BURST} (tiny: {TINY_BURST}) calls back to back, no synchronisation inside a round. "
    f"wall time: of one of {WALL_CALLS} calls from a common start, by CUDA events, on the slowest "
    f"rank. sequence: {TENSORS} bfloat16 gradients of {SIDE} x {SIDE} are added to float32 ones, "
    "clipped by their norm over all ranks (ops.all_reduce), and taken by an Adam step, all in "
    f"_foreach operators. module: forward and backward of {LAYERS} linear layers {FEATURES} x "
    f"{FEATURES} with ReLU, batch {BATCH}, into gradients that are there. tiny: one kernel, no "
    f"argument, no result. memory: growth of torch.cuda.memory_reserved(), once, by {FUNCTIONS} "
    f"functions that take {LARGE_BYTES // 2**20} MiB each on their way. {BARE}: "
    "torch.cuda.CUDAGraph of the same function, on a stream and in its own pool."
)


def refusal(nproc: int) -> str | None:
    """Say what is missing here; one rank is enough."""
    return gpu_refusal(nproc, least=1)


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one a rank."""
    return report(launch("capture", nproc, rounds=rounds), {"nproc": nproc, "rounds": rounds})


# -- what becomes of the samples ------------------------------------------------------------------


class Goal(NamedTuple):
    """The target: at most ``limit`` of the peer's time, or, ``over`` it, µs more."""

    kind: str
    figure: str
    peer: str
    limit: float
    over: bool = False
    ours: str = OURS

    def finding(self, samples: Samples) -> str:
        """Say whether it is met."""
        label = f"{self.kind}, {self.figure.partition(',')[0]}, {self.ours}"
        if self.over:
            more = spread(samples[self.ours]).middle - spread(samples[self.peer]).middle
            return target(f"{label} over {self.peer}", more * 1e6, self.limit, " µs")
        part = ratio(samples[self.ours], samples[self.peer]).middle
        return target(f"{label} / {self.peer}", part, self.limit)


GOALS = (
    Goal("sequence", HOST, EAGER, 0.15),
    Goal("sequence", WALL, BARE, 1.05),
    Goal("module", WALL, GRAPHED, 1.20),
    Goal("module", WALL, GRAPHED, 1.00, ours=LENT),
    Goal("module", WALL, GRAPHED, 1.00, ours=ADDED),
    Goal("tiny", HOST, BARE, 3.0, over=True),
    Goal("memory", RESERVED, BARE, 0.50),
)


def report(found: dict[str, Any], settings: dict[str, int]) -> Report:
    """Turn the samples of each kind and figure into a table and findings."""
    samples, stats = found["samples"], found["graph"]
    return Report(
        name="capture",
        caption=CAPTION.format(**settings),
        columns=timing_columns("value", ("the target's peer",), "kind", "figure"),
        rows=tuple(_rows(samples)),
        findings=(
            *(goal.finding(samples[goal.kind][goal.figure]) for goal in GOALS),
            f"sequence: a graph of {stats['nodes']} nodes, captured in {stats['seconds']:.2f} s",
        ),
        settings=settings,
    )


def _rows(samples: Mapping[str, Mapping[str, Samples]]) -> Iterator[Row]:
    for kind, figure, peer in dict.fromkeys((each.kind, each.figure, each.peer) for each in GOALS):
        by_peer, unit = samples[kind][figure], UNITS[figure]
        yield from timing_rows(by_peer, (peer,), unit, kind, figure)


# -- on each rank ---------------------------------------------------------------------------------


def measure(rounds: int) -> dict[str, Any]:
    """Return, on each rank, the samples of every kind, and facts of the sequence's graph.

    Memory comes first: what other kinds had left in the shared pool would be no growth.
    """
    ring = commlib.init("nccl", timeout=TIMEOUT)  # makes this rank's GPU the current one
    memory = _memory(ring.device)
    sequence, stats = _sequence(ring, rounds)
    samples = {
        "sequence": sequence,
        "module": {WALL: _module(ring, rounds)},
        "tiny": {HOST: _tiny(ring.device, rounds)},
        "memory": {RESERVED: memory},
    }
    commlib.shutdown()
    return {"samples": samples, "graph": stats}


def _sequence(ring: CommContext, rounds: int) -> tuple[dict[str, Samples], dict[str, float]]:
    updates = {name: Update(ring) for name in (OURS, BARE, EAGER)}
    ours, bare = captured(updates[OURS].step), by_hand(updates[BARE].step)
    calls: dict[str, Call] = {OURS: ours, BARE: bare.replay, EAGER: updates[EAGER].step}
    check("sequence", {name: updates[name].after(call) for name, call in calls.items()})
    samples: dict[str, Samples] = {
        HOST: _hosts(calls, rounds, UPDATE_BURST),
        WALL: walls(ring, calls, rounds),
    }
    (row,) = graph.report(ours)
    ours.reset()
    bare.reset()  # before the communicator that it uses is closed
    return samples, {"nodes": row["nodes"], "seconds": row["capture_seconds"]}


def _module(ring: CommContext, rounds: int) -> Samples:
    passes = {name: Passes(ring.device) for name in (OURS, LENT, ADDED, GRAPHED, EAGER)}
    ours, theirs = graph.capture(passes[OURS].module), passes[GRAPHED]
    lent = graph.capture(passes[LENT].module, gradients="borrow")
    added = graph.capture(passes[ADDED].module, gradients="accumulate")
    forwards: dict[str, Any] = {
        OURS: ours,
        LENT: lent,
        ADDED: added,
        GRAPHED: torch.cuda.make_graphed_callables(theirs.module, (theirs.x,)),
        EAGER: passes[EAGER].module,
    }
    calls = {name: partial(passes[name].both, forward) for name, forward in forwards.items()}
    check("module", {name: passes[name].after(call) for name, call in calls.items()})
    samples = walls(ring, calls, rounds)
    ours.reset()
    lent.reset()
    added.reset()
    return samples


def _tiny(device: torch.device, rounds: int) -> Samples:
    counters = {name: Counter(device) for name in (OURS, BARE, EAGER)}
    ours, bare = captured(counters[OURS].count), by_hand(counters[BARE].count)
    calls: dict[str, Call] = {OURS: ours, BARE: bare.replay, EAGER: counters[EAGER].count}
    check("tiny", {name: counters[name].after(call) for name, call in calls.items()})
    samples = _hosts(calls, rounds, TINY_BURST)
    ours.reset()
    bare.reset()
    return samples


def _memory(device: torch.device) -> Samples:
    sums = {name: [Large(device, i) for i in range(FUNCTIONS)] for name in (OURS, BARE, EAGER)}
    before = _reserved()
    ours = [captured(one.add) for one in sums[OURS]]
    between = _reserved()
    bare = [by_hand(one.add) for one in sums[BARE]]
    after = _reserved()
    calls: dict[str, list[Call]] = {
        OURS: [*ours],
        BARE: [one.replay for one in bare],
        EAGER: [one.add for one in sums[EAGER]],
    }
    check("memory", {name: _results(sums[name], calls[name]) for name in calls})
    for graphed, replayed in zip(ours, bare, strict=True):
        graphed.reset()
        replayed.reset()
    return {OURS: [float(between - before)], BARE: [float(after - between)]}


def _results(sums: list[Large], calls: list[Call]) -> list[torch.Tensor]:
    """Return what each writes, after all of them: none may have written into another's."""
    for one, call in zip(sums, calls, strict=True):
        one.out.zero_()
        call()
    return [one.out.clone() for one in sums]


def _reserved() -> int:
    """Return the bytes that torch keeps for what is alive, graphs included."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


# -- meters ---------------------------------------------------------------------------------------


def _hosts(calls: Mapping[str, Call], rounds: int, burst: int) -> Samples:
    return race(calls, rounds=rounds, calls=burst, settle=torch.cuda.synchronize)


def walls(ring: CommContext, calls: Mapping[str, Call], rounds: int) -> Samples:
    """Return the seconds of each call on the slowest rank, one value a round."""
    meters = {name: partial(_wall, ring, call) for name, call in calls.items()}
    return interleave(meters, rounds=rounds)


def _wall(ring: CommContext, call: Call) -> float:
    """Return the seconds of one call on the slowest rank.

    The ranks start together: after a barrier and one call that is not timed.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ring.barrier()
    call()
    start.record()
    for _ in range(WALL_CALLS):
        call()
    end.record()
    end.synchronize()
    nanoseconds = round(start.elapsed_time(end) * 1e6)
    slowest = max(taken for (taken,) in ring.exchange([nanoseconds]))
    return slowest / 1e9 / WALL_CALLS
