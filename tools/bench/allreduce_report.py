"""The report of the benchmark `allreduce`: the table, the findings and the plot."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from commlib.tools.bench.allreduce_norm import OURS_NORM, WIDTH, peer
from commlib.tools.bench.graph import CALLS, REPLAYS
from commlib.tools.bench.peers.nccl_windows import NCCL_WINDOWS
from commlib.tools.bench.peers.watch import failures, span
from commlib.tools.bench.peers.ways import (
    NCCL,
    ONE_SHOT,
    ONE_SHOT_MOST,
    OURS,
    TORCH_PEERS,
    TWO_SHOT,
)
from commlib.tools.bench.plot import draw, size_label
from commlib.tools.bench.report import Report, Row, number, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, ratio, spread

GRAPH_BYTES = tuple(2**power for power in (10, 12, 14, 16, 17, 18, 19, 20, 22, 24, 26))
EAGER_BYTES = (2**10, 2**16)
TOKENS = (1, 8, 32, 128)
EAGER, DIST = "ops.all_reduce(x, out=x)", "dist.all_reduce(x)"
SYMM = "symm_mem.one_shot_all_reduce(x)"
OWN = (OURS, EAGER, OURS_NORM)
OF_TORCH = (*TORCH_PEERS, *map(peer, TORCH_PEERS))
LIMITS = {  # largest size of a class, in bytes -> ratio to the best of torch, by number of GPUs
    2**16: {2: 0.42, 4: 0.50, 8: 0.48},
    2**20: {2: 0.55, 4: 0.65, 8: 0.70},
    2**26: {2: 0.85, 4: 0.90, 8: 0.92},
}
OF_ALL = {2**20: 1.00, 2**26: 0.97}  # largest size -> ratio to the best of all peers
EAGER_US, OF_SYMM, OF_DIST, OF_NORM = 7.0, 0.60, 0.20, 0.55
FLASHINFER, OF_FLASHINFER = "FlashInfer", 0.85
OFF = {  # what switches NVLink multicast off
    "NCCL_NVLS_ENABLE": ("0",),
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": ("1", "on", "true", "yes"),
    "NVSHMEM_DISABLE_NVLS": ("1", "on", "true", "yes"),
}
CAPTION = (
    "Time of one bfloat16 sum over {nproc} GPUs, flag on, every peer over the same ranks in the "
    f"same processes, each right on random values first. graph: {CALLS} calls in a CUDA graph, "
    f"replayed {REPLAYS} times from a common start, by CUDA events, on the slowest rank. eager: "
    "host time on rank 0, calls back to back. fused: as graph, a sum of tokens x "
    f"{WIDTH} with a residual and an RMS norm after it. Peers of torch: {NCCL}, "
    f"torch.distributed.all_reduce in place; {NCCL_WINDOWS}, the same in memory registered with "
    f"NCCL; {ONE_SHOT}, torch's kernel from symmetric into plain memory, up to "
    f"{size_label(ONE_SHOT_MOST)}; {TWO_SHOT}, torch's kernel in place in symmetric memory, on 2, "
    "4 and 8 GPUs. {libraries}Nothing counts copies into symmetric memory. For fused, each of "
    "them and one torch.compile'd function. {multicast}"
)


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


def report(
    found: dict[str, Any], settings: dict[str, int], multicast: str, libraries: str | None = None
) -> Report:
    """Turn the samples of each kind and size into a table, findings and a plot.

    Args:
        found: Kind -> size -> peer -> samples; "carriers" and "failed" with their texts.
        settings: Ranks and rounds.
        multicast: What the environment makes of it.
        libraries: What the folder of peers has; None without one.
    """
    by_bytes = {n: found["graph"][size_label(n)] for n in GRAPH_BYTES}
    more = "" if libraries is None else "Peers by --peers: kernels of other projects. "
    return Report(
        name="allreduce",
        caption=CAPTION.format(nproc=settings["nproc"], multicast=multicast, libraries=more),
        columns=timing_columns("µs", ("the best peer",), "kind", "size"),
        rows=tuple(_rows(found)),
        findings=(
            *_graph_findings(found["graph"], settings["nproc"]),
            *_eager_findings(found["eager"]),
            *_norm_findings(found["fused"]),
            *(() if libraries is None else _of_all(found, libraries)),
            *failures(found["failed"]),
            *_carriers(found["carriers"]),
        ),
        settings=settings if libraries is None else {**settings, "peers": "FOLDER"},
        plot=partial(
            draw, title=f"all_reduce in a graph, {settings['nproc']} GPUs", sizes=by_bytes
        ),
    )


def _rows(found: dict[str, Any]) -> Iterator[Row]:
    for kind in ("graph", "eager", "fused"):
        for size, samples in found[kind].items():
            yield from timing_rows(samples, (_best(samples),), 1e6, kind, size)


def _best(found: Samples, among: Sequence[str] | None = None) -> str | None:
    """Name the fastest peer, of those in ``among`` if given; None if each of them failed."""
    peers = [name for name in found if name not in OWN and (among is None or name in among)]
    return min(peers, key=lambda name: spread(found[name]).middle, default=None)


class Point(NamedTuple):
    """Our time at one size, in relation to a peer's."""

    part: float
    size: str
    peer: str


def _points(sizes: Mapping[str, Samples], ours: str, among: Sequence[str] | None) -> list[Point]:
    """Return our ratio to the best peer of each size that has one."""
    best = {size: _best(samples, among) for size, samples in sizes.items()}
    return [
        Point(ratio(sizes[size][ours], sizes[size][name]).middle, size, name)
        for size, name in best.items()
        if name is not None
    ]


def _worst(sizes: Mapping[str, Samples], ours: str, among: Sequence[str]) -> Point | None:
    """Return the point with the largest ratio; None if no size has a peer."""
    return max(_points(sizes, ours, among), key=lambda point: point.part, default=None)


def _graph_findings(sizes: Mapping[str, Samples], nproc: int) -> Iterator[str]:
    least = 0
    for most, limits in LIMITS.items():
        inside = [size_label(n) for n in GRAPH_BYTES if least < n <= most]
        least = most
        worst = _worst({size: sizes[size] for size in inside}, OURS, OF_TORCH)
        span = f"graph, {inside[0]}..{inside[-1]}"
        if worst is None:
            yield f"{span}: every peer of torch failed"
            continue
        label = f"{span}, {OURS} / the best peer of torch, at worst ({worst.size}, {worst.peer})"
        if nproc in limits:
            yield target(label, worst.part, limits[nproc])
        else:
            yield f"{label}: {number(worst.part)}; no target on {nproc} GPUs"


def _eager_findings(sizes: Mapping[str, Samples]) -> Iterator[str]:
    slowest = max(spread(samples[EAGER]).middle for samples in sizes.values())
    yield target(f"eager, {EAGER}, at worst", slowest * 1e6, EAGER_US, " µs")
    for name, limit in ((SYMM, OF_SYMM), (DIST, OF_DIST)):
        worst = max(_points(sizes, EAGER, (name,)), key=lambda point: point.part)
        yield target(f"eager, {EAGER} / {name}, at worst ({worst.size})", worst.part, limit)


def _norm_findings(sizes: Mapping[str, Samples]) -> Iterator[str]:
    if not sizes:
        yield f"fused: this commlib has no {OURS_NORM}"
        return
    worst = _worst(sizes, OURS_NORM, OF_TORCH)
    if worst is None:
        yield "fused: every peer of torch failed"
        return
    label = f"fused, {OURS_NORM} / the best peer of torch, at worst ({worst.size}, {worst.peer})"
    yield target(label, worst.part, OF_NORM)


def _of_all(found: dict[str, Any], libraries: str) -> Iterator[str]:
    """Yield our ratios to the best peer of all at each size, and to FlashInfer's fused kernel."""
    yield libraries
    limits = {
        size_label(n): next(limit for most, limit in OF_ALL.items() if n <= most)
        for n in GRAPH_BYTES
    }
    for part, size, name in _points(found["graph"], OURS, None):
        label = f"graph, {size}, {OURS} / the best of all peers ({name})"
        yield target(label, part, limits[size])
    fused = {name for samples in found["fused"].values() for name in samples}
    flashinfer = [name for name in fused if name.startswith(FLASHINFER) and "+" not in name]
    for part, size, name in _points(found["fused"], OURS_NORM, flashinfer):
        yield target(f"fused, {size}, {OURS_NORM} / {name}", part, OF_FLASHINFER)


def _carriers(said: Mapping[str, str]) -> Iterator[str]:
    """Yield what ring 0 says of itself, once for consecutive sizes with the same answer."""
    for answer, same in groupby(said, key=lambda size: said[size]):
        yield f"ring 0, {span(list(same))}: {answer}"
