"""graph.report: what graphs hold per device, and the drift between ranks."""

import time
from typing import Any

import torch

import commlib
from commlib import graph, ops
from commlib.deadlines import Deadline
from commlib.errors import GraphError
from commlib.graph.drift import _clock_offsets, compare, own_times
from commlib.graph.report import _captured
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on

DRIFT = "FLAGS_graph_drift"
LATE_S = 0.3  # more than a rank waits for its turn on a GPU that dozens of processes share


def test_compared_replays() -> None:
    """The last replays of the ranks correspond, however many each rank has kept."""
    ms = 1_000_000
    times = {
        0: [(0, 1 * ms), (10 * ms, 14 * ms), (20 * ms, 28 * ms)],
        3: [(12 * ms, 15 * ms), (21 * ms, 28 * ms)],
        5: [(11 * ms, 16 * ms), (26 * ms, 28 * ms)],
    }
    row = compare("step", times)
    assert row == {
        "function": "step",
        "replays": 2,
        "replay_us": {0: 6000.0, 3: 5000.0, 5: 3500.0},
        "spread_us": 4000.0,  # 3..5 ms, then 2..8 ms
        "worst_spread_us": 6000.0,
        "slowest_rank": 0,
        "late_us": 4000.0,  # 10..12 ms, then 20..26 ms
        "worst_late_us": 6000.0,
        "latest_rank": 3,  # once each; the first of them
    }


def test_what_has_no_report() -> None:
    for other in (3, torch.nn.Linear(2, 2)):
        with raises(GraphError, f"report({type(other).__name__}): expected what graph.capture"):
            graph.report(other)


@runs_on("unified_ranks")
def test_drift(comm: Any) -> None:
    """A rank that calls late is named on every rank, and the last replays are kept."""
    with commlib.flags.override(DRIFT, 3):
        step = graph.capture(lambda x: ops.all_reduce(x) + 1, outputs="copy", verify=False)
        alone = graph.capture(lambda x: x * 2, outputs="copy", verify=False)
        x = torch.ones(4, device=comm.device)
        for _ in range(6):
            if comm.rank == 1:
                time.sleep(LATE_S)
            step(x)
            alone(x)
    report = graph.report(step, drift=0)
    assert report.drift is not None
    (row,) = report.drift
    assert_equal((row["function"], row["replays"]), (step.name, 3), "the last replays")
    assert_equal((row["latest_rank"], row["slowest_rank"]), (1, 0), "rank 0 waits for rank 1")
    assert_equal(sorted(row["replay_us"]), list(comm.ranks), "ranks")
    assert_equal(row["worst_late_us"] >= row["late_us"] > 0, True, f"{row}")
    said = comm._hosts.exchange_bytes(repr(row).encode())
    assert_equal(set(said), {repr(row).encode()}, "the same row on every rank")
    for text in (str(report), report.page(), report._repr_html_()):
        assert_equal("latest rank" in text, True, "the table of drift")
    assert_equal(graph.report(alone, drift=0).drift, [], "functions without collectives")


@runs_on("unified_ranks")
def test_drift_of_a_backward(comm: Any) -> None:
    """Forward and backward are compared alone; slots are one list."""
    weight = torch.ones(2, device=comm.device, requires_grad=True)
    x = torch.ones(2 * comm.size, device=comm.device)
    with commlib.flags.override(DRIFT, 10):
        f = graph.capture(lambda x: ops.all_gather(weight) * x, outputs="copy", verify=False)
        for _ in range(4):
            first, second = (f(x) for _ in range(2))
            (first.sum() + second.sum()).backward()
    rows = graph.report(f, drift=0).drift
    assert_equal([row["function"] for row in rows or ()], [f.name, f"{f.name} (backward)"], "")
    (replays,) = {row["replays"] for row in rows or ()}
    assert_equal(4 < replays < 8, True, f"more than one slot has: {replays} of 8 calls")


@runs_on("cpu_ranks")
def test_times_of_kinds(comm: Any) -> None:
    """The last replays of all kinds are kept, also those of a graph that one rank has released."""
    with commlib.flags.override(DRIFT, 4):
        f, early = (
            graph.capture(lambda x: ops.all_reduce(x) + 1, outputs="copy", verify=False)
            for _ in range(2)
        )
        alone = graph.capture(lambda x: x + 1, outputs="copy", verify=False)
    few, many = (torch.ones(n) for n in (4, 8))
    for turn in range(6):
        if turn == 4:
            began = time.perf_counter_ns()
        for x in (few, many):
            f(x)
            alone(x)
            if turn < 3:
                early(x)
    if comm.rank == 0:
        f.entries.drop(next(iter(f.entries)))
    ((name, spans),) = own_times(comm, [f, early, alone]).items()
    assert_equal((name, len(spans)), (f.name, 4), "as many as the flag says")
    assert_equal(all(first >= began for first, _ in spans), True, f"the last four: {spans}")
    assert alone.entries.times is not None
    counts = [len(times.replays(Deadline(1)) or ()) for _, times in alone.entries.times.parts()]
    assert_equal(sum(counts), 0, "a function without collectives is not timed")


@runs_on("unified_ranks")
def test_drift_that_was_not_timed(comm: Any) -> None:
    f = graph.capture(lambda x: ops.all_reduce(x), outputs="copy")
    for _ in range(3):
        f(torch.ones(2, device=comm.device))
    report = graph.report(f, drift=0)
    assert_equal(report.drift, [], "rows")
    for text in (str(report), report.page()):
        assert_equal("set FLAGS_graph_drift=100" in text, True, "the remedy")
    assert_equal(graph.report(f).drift, None, "without a comparison")
    with raises(graph.GraphError, "drift=True", "number of a ring"):
        graph.report(f, drift=True)
    with raises(commlib.errors.RingError):
        graph.report(f, drift=77)


@runs_on("ranks")
def test_clocks_of_hosts(comm: Any) -> None:
    """Offsets are those of the first member; here all members read one clock."""
    assert_equal(_clock_offsets(comm, [7] * comm.size), [0] * comm.size, "one host")
    offsets = _clock_offsets(comm, list(range(comm.size)))
    assert_equal(offsets[0], 0, "the first member")
    assert_equal(all(abs(offset) < 1e9 for offset in offsets), True, f"as two hosts: {offsets}")


@runs_on("three_ranks")
def test_clocks_of_two_hosts(comm: Any) -> None:
    """Members of one host have one offset, also where another host takes part."""
    _, second, third = _clock_offsets(comm, [1, 2, 2])
    assert_equal(second, third, "one clock")


def test_report_while_another_thread_captures() -> None:
    """Kinds that are captured or released meanwhile do not disturb the rows of others."""
    f = graph.capture(lambda x: x + 1, outputs="copy", verify=False)
    for n in (1, 2):
        f(torch.ones(n))
    rows = _captured(f)
    first = next(rows)
    f(torch.ones(3))
    f.entries.drop(next(iter(f.entries)))
    assert [row["function"] for row in (first, *rows)] == [f.name] * 2


@runs_on("unified_ranks")
def test_memory(comm: Any) -> None:
    """The report says what holds the graphs of each device, and how much."""
    f = graph.capture(lambda x: (x * 2).sum(), outputs="copy")
    x = torch.ones(1 << 20, device=comm.device)
    for _ in range(2):
        f(x)
    report = graph.report(f)
    (memory,) = report.memory
    assert_equal(memory["device"], str(comm.device), "device")
    assert_equal(memory["allocator"], "cpu" if x.device.type == "cpu" else "native", "allocator")
    if x.device.type == "cpu":
        assert_equal(memory["graph_bytes"], report[0]["pool_bytes"], "of all rows")
    assert_equal(memory["total_bytes"] >= memory["graph_bytes"] > 0, True, f"{memory}")
    assert_equal(f"{memory['graph_bytes']}" in str(report), True, "the table")
    assert_equal(graph.report(graph.capture(lambda: None)).memory, [], "without graphs")
