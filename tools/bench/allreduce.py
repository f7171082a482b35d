"""Benchmark `allreduce`: a sum over GPU ranks, in a graph, from the host, and with a norm."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commlib import CommContext, ops
from commlib.tools.bench.allreduce_norm import OURS_NORM, WIDTH, NormWays, available
from commlib.tools.bench.allreduce_peers import (
    DTYPE,
    NCCL,
    ONE_SHOT,
    ONE_SHOT_MOST,
    OURS,
    TWO_SHOT,
    Near,
    Way,
    Ways,
    check,
    expect_sum,
)
from commlib.tools.bench.graph import CALLS, REPLAYS, Captured
from commlib.tools.bench.launch import launch
from commlib.tools.bench.machine import gpu_refusal
from commlib.tools.bench.pair import ring_and_group
from commlib.tools.bench.plot import draw, size_label
from commlib.tools.bench.report import Report, Row, number, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, interleave, race, ratio, spread

ROUNDS = 7
GRAPH_BYTES = tuple(2**power for power in (10, 12, 14, 16, 17, 18, 19, 20, 22, 24, 26))
EAGER_BYTES = (2**10, 2**16)
TOKENS = (1, 8, 32, 128)
BURST = 100  # eager calls of a turn: fewer than the launches that a GPU's queue holds
EAGER, DIST = "ops.all_reduce(x, out=x)", "dist.all_reduce(x)"
SYMM = "symm_mem.one_shot_all_reduce(x)"
OWN = (OURS, EAGER, OURS_NORM)
LIMITS = {  # largest size of a class, in bytes -> ratio to the best peer, by number of GPUs
    2**16: {2: 0.42, 4: 0.50, 8: 0.48},
    2**20: {2: 0.55, 4: 0.65, 8: 0.70},
    2**26: {2: 0.85, 4: 0.90, 8: 0.92},
}
EAGER_US, OF_SYMM, OF_DIST, OF_NORM = 7.0, 0.60, 0.20, 0.55
OFF = {  # what switches NVLink multicast off
    "NCCL_NVLS_ENABLE": ("0",),
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": ("1", "on", "true", "yes"),
    "NVSHMEM_DISABLE_NVLS": ("1", "on", "true", "yes"),
}
CAPTION = (
    "Time of one bfloat16 sum over {nproc} GPUs, flag on, every peer over the same ranks in the "
    f"same processes, each right on random values first. graph: {CALLS} calls in a CUDA graph, "
    f"replayed {REPLAYS} times from a common start, by CUDA events, on the slowest rank. eager: "
    f"host time on rank 0, {BURST} calls back to back. fused: as graph, a sum of tokens x {WIDTH} "
    f"with a residual and an RMS norm after it. Peers: {NCCL}, torch.distributed.all_reduce in "
    f"place; {ONE_SHOT}, torch's kernel from symmetric into plain memory, up to "
    f"{size_label(ONE_SHOT_MOST)}; {TWO_SHOT}, torch's kernel in place in symmetric memory, on 2, "
    "4 and 8 GPUs. Nothing counts copies into symmetric memory. For fused, each of them and one "
    "torch.compile'd function. {multicast}"
)

refusal = gpu_refusal


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one a rank."""
    found = launch("allreduce", nproc, rounds=rounds)
    return report(found, {"nproc": nproc, "rounds": rounds}, multicast(os.environ))


def multicast(environment: Mapping[str, str]) -> str:
    """Say what the environment makes of NVLink multicast."""
    said = [
        f"{name}={environment[name]}"
        for name, off in OFF.items()
        if environment.get(name, "").lower() in off
    ]
    if not said:
        return "NVLink multicast is left to NCCL and torch."
    return f"NVLink multicast is off by {', '.join(said)}."


# -- what becomes of the samples ------------------------------------------------------------------


def report(found: dict[str, Any], settings: dict[str, int], multicast: str) -> Report:
    """Turn the samples of each kind and size into a table, findings and a plot."""
    by_bytes = {n: found["graph"][size_label(n)] for n in GRAPH_BYTES}
    return Report(
        name="allreduce",
        caption=CAPTION.format(nproc=settings["nproc"], multicast=multicast),
        columns=timing_columns("µs", ("the best peer",), "kind", "size"),
        rows=tuple(_rows(found)),
        findings=(
            *_graph_findings(found["graph"], settings["nproc"]),
            *_eager_findings(found["eager"]),
            _norm_finding(found["fused"]),
            *_carriers(found["carriers"]),
        ),
        settings=settings,
        plot=partial(
            draw, title=f"all_reduce in a graph, {settings['nproc']} GPUs", sizes=by_bytes
        ),
    )


def _rows(found: dict[str, Any]) -> Iterator[Row]:
    for kind in ("graph", "eager", "fused"):
        for size, samples in found[kind].items():
            yield from timing_rows(samples, (_best(samples),), 1e6, kind, size)


def _best(found: Samples) -> str:
    """Name the fastest peer."""
    peers = (name for name in found if name not in OWN)
    return min(peers, key=lambda name: spread(found[name]).middle)


class Point(NamedTuple):
    """Our time at one size, in relation to a peer's."""

    part: float
    size: str
    peer: str


def _worst(sizes: Mapping[str, Samples], ours: str, peer: str | None = None) -> Point:
    """Return the point with the largest ratio to ``peer``, or to the best peer of each size."""
    against = {size: peer or _best(found) for size, found in sizes.items()}
    points = (
        Point(ratio(found[ours], found[against[size]]).middle, size, against[size])
        for size, found in sizes.items()
    )
    return max(points, key=lambda point: point.part)


def _graph_findings(sizes: Mapping[str, Samples], nproc: int) -> Iterator[str]:
    least = 0
    for most, limits in LIMITS.items():
        inside = [size_label(n) for n in GRAPH_BYTES if least < n <= most]
        worst = _worst({size: sizes[size] for size in inside}, OURS)
        what = (
            f"graph, {inside[0]}..{inside[-1]}, {OURS} / the best peer, at worst "
            f"({worst.size}, {worst.peer})"
        )
        if nproc in limits:
            yield target(what, worst.part, limits[nproc])
        else:
            yield f"{what}: {number(worst.part)}; no target on {nproc} GPUs"
        least = most


def _eager_findings(sizes: Mapping[str, Samples]) -> Iterator[str]:
    slowest = max(spread(found[EAGER]).middle for found in sizes.values())
    yield target(f"eager, {EAGER}, at worst", slowest * 1e6, EAGER_US, " µs")
    for peer, limit in ((SYMM, OF_SYMM), (DIST, OF_DIST)):
        worst = _worst(sizes, EAGER, peer)
        yield target(f"eager, {EAGER} / {peer}, at worst ({worst.size})", worst.part, limit)


def _norm_finding(sizes: Mapping[str, Samples]) -> str:
    if not sizes:
        return f"fused: this commlib has no {OURS_NORM}"
    worst = _worst(sizes, OURS_NORM)
    what = f"fused, {OURS_NORM} / the best peer, at worst ({worst.size}, {worst.peer})"
    return target(what, worst.part, OF_NORM)


def _carriers(said: Mapping[str, str]) -> Iterator[str]:
    """Yield what ring 0 says of itself, once for consecutive sizes with the same answer."""
    for answer, same in groupby(said, key=lambda size: said[size]):
        sizes = list(same)
        span = sizes[0] if len(sizes) == 1 else f"{sizes[0]}..{sizes[-1]}"
        yield f"ring 0, {span}: {answer}"


# -- on each rank ---------------------------------------------------------------------------------


def measure(rounds: int) -> dict[str, Any]:
    """Return, on each rank, the samples of every kind, size and peer, and what ring 0 says."""
    with ring_and_group("nccl") as ring:
        return _measure(ring, rounds)


def _measure(ring: CommContext, rounds: int) -> dict[str, Any]:
    """Release all graphs and symmetric memory at the end, before the group is destroyed."""
    ways = Ways(ring, GRAPH_BYTES[-1])
    graph = {
        size_label(n): _replayed(ring, ways.of(n // DTYPE.itemsize), expect_sum, rounds)
        for n in GRAPH_BYTES
    }
    norms = {f"{n} x {WIDTH}": NormWays(ways, n) for n in (TOKENS if available() else ())}
    return {
        "graph": graph,
        "eager": {size_label(n): _eager(ways, n // DTYPE.itemsize, rounds) for n in EAGER_BYTES},
        "fused": {
            size: _replayed(ring, norm.all(), norm.expect, rounds) for size, norm in norms.items()
        },
        "carriers": {size_label(n): ring.explain(n, DTYPE) for n in GRAPH_BYTES},
    }


def _replayed(
    ring: CommContext,
    ways: Mapping[str, Way],
    expect: Callable[[torch.Tensor], tuple[Near, ...]],
    rounds: int,
) -> dict[str, list[float]]:
    """Return the samples of all ``ways`` in graphs, which all exist at the same time."""
    check(ways, expect)
    graphs = {name: Captured(ring, way.x, way.call) for name, way in ways.items()}
    found = interleave({name: graph.turn for name, graph in graphs.items()}, rounds=rounds)
    for graph in graphs.values():
        graph.close()
    torch.cuda.empty_cache()
    return found


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
