"""Benchmark `allreduce`: a sum over GPU ranks, in a graph, from the host, and with a norm."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from commlib import ops
from commlib.tools.bench.allreduce_norm import WIDTH, NormWays, available
from commlib.tools.bench.allreduce_report import (
    DIST,
    EAGER,
    EAGER_BYTES,
    GRAPH_BYTES,
    OWN,
    SYMM,
    TOKENS,
    multicast,
    report,
)
from commlib.tools.bench.graph import Captured
from commlib.tools.bench.machine import gpu_refusal
from commlib.tools.bench.pair import ring_and_group
from commlib.tools.bench.peers.folder import contents
from commlib.tools.bench.peers.launch import launch_with_peers
from commlib.tools.bench.peers.watch import Watch
from commlib.tools.bench.peers.way import DTYPE, Near, Way, expect_sum
from commlib.tools.bench.peers.ways import ONE_SHOT, OURS, Ways, checked
from commlib.tools.bench.plot import size_label
from commlib.tools.bench.report import Report
from commlib.tools.bench.rounds import interleave, race

ROUNDS = 7
OPTIONS = ("peers",)
BURST = 100  # eager calls of a turn: fewer than the launches that a GPU's queue holds

refusal = gpu_refusal


def run(nproc: int, rounds: int, peers: str | None = None) -> Report:
    """Measure on ``nproc`` GPUs, one a rank; ``peers`` is a folder of libraries."""
    results = launch_with_peers("allreduce", nproc, peers, rounds=rounds)
    said = None if peers is None else contents(peers, "allreduce")
    return report(results, {"nproc": nproc, "rounds": rounds}, multicast(os.environ), said)


# -- on each rank ---------------------------------------------------------------------------------


def measure(
    rounds: int, libraries: Mapping[str, str], journal: str, lost: list[str]
) -> dict[str, Any]:
    """Return, on each rank, the samples of every kind, size and peer, and what ring 0 says.

    Args:
        rounds: How many values each peer gets.
        libraries: Paths of libraries of peers.
        journal: A folder for the peer that each rank runs.
        lost: Peers that ended the ranks before.
    """
    with ring_and_group("nccl") as ring:
        watch = Watch(ring, journal, lost, torch.cuda.synchronize)
        return _measure(Ways(ring, GRAPH_BYTES[-1], watch, libraries), rounds)


def _measure(ways: Ways, rounds: int) -> dict[str, Any]:
    """Release all graphs and symmetric memory at the end, before the group is destroyed."""
    graph = {
        size_label(n): _replayed(
            ways, ways.of(n // DTYPE.itemsize), expect_sum, rounds, f"graph, {size_label(n)}"
        )
        for n in GRAPH_BYTES
    }
    norms = {f"{n} x {WIDTH}": NormWays(ways, n) for n in (TOKENS if available() else ())}
    results = {
        "graph": graph,
        "eager": {size_label(n): _eager(ways, n // DTYPE.itemsize, rounds) for n in EAGER_BYTES},
        "fused": {
            size: _replayed(ways, norm.all(), norm.expect, rounds, f"fused, {size}")
            for size, norm in norms.items()
        },
        "carriers": {size_label(n): ways.ring.explain(n, DTYPE) for n in GRAPH_BYTES},
        "failed": ways.watch.failed,
    }
    ways.close()
    return results


def _replayed(
    ways: Ways,
    here: Mapping[str, Way],
    expect: Callable[[torch.Tensor], tuple[Near, ...]],
    rounds: int,
    where: str,
) -> dict[str, list[float]]:
    """Return the samples of the ways ``here`` in graphs, which all exist at the same time."""
    graphs = {}
    for name, way in checked(here, OWN, expect, ways.watch, where).items():
        graph = _captured(ways, name, way, where)
        if graph is not None:
            graphs[name] = graph
    turns = {
        name: graph.turn if name in OWN else ways.watch.meter(name, graph.turn)
        for name, graph in graphs.items()
    }
    samples = interleave(turns, rounds=rounds)
    for graph in graphs.values():
        graph.close()
    torch.cuda.empty_cache()
    return samples


def _captured(ways: Ways, name: str, way: Way, where: str) -> Captured | None:
    """Return the graph of a way, or None for a peer that can't be captured."""
    if name in OWN:
        return Captured(ways.ring, way.x, way.call)
    return ways.watch.attempt(name, where, lambda: Captured(ways.ring, way.x, way.call))


def _eager(ways: Ways, count: int, rounds: int) -> dict[str, list[float]]:
    ring, shared = ways.ring, ways.shared[ONE_SHOT][:count]
    x, out, mine = (torch.randn(count, device=ring.device).to(DTYPE) for _ in range(3))
    one_shot = torch.ops.symm_mem.one_shot_all_reduce
    calls: dict[str, Callable[[], object]] = {
        EAGER: lambda: ops.all_reduce(x, out=x),
        OURS: lambda: ring.all_reduce(out, x),
        DIST: lambda: dist.all_reduce(mine),
        SYMM: lambda: one_shot(shared, "sum", ways.group),
    }
    return race(calls, rounds=rounds, calls=BURST, settle=torch.cuda.synchronize)
