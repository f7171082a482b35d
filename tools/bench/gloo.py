"""Benchmark `gloo`: an eager all_reduce of CPU ranks against torch.distributed over gloo."""

import torch
import torch.distributed as dist

from commlib import ops
from commlib.tools.bench.launch import launch
from commlib.tools.bench.pair import ring_and_group
from commlib.tools.bench.report import Report, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, race, ratio

ROUNDS = 100
SIZES = {"4 B": (1, 100), "64 KiB": (2**14, 30), "4 MiB": (2**20, 5)}  # floats, calls a round
IN_PLACE, FRESH = "ops.all_reduce(x, out=x)", "ops.all_reduce(x)"
DIST, DIST_CLONE = "dist.all_reduce(x)", "dist.all_reduce(x.clone())"
BACKEND = 'dist.all_reduce(x), backend "commlib"'
PEER = {
    IN_PLACE: DIST,
    FRESH: DIST_CLONE,
    BACKEND: DIST,
}  # each against the one that does the same work
LIMIT = 1.10
CAPTION = (
    f"Time of one blocking float32 sum on rank 0, flag on. Peer: torch.distributed on a gloo group "
    f"of the same ranks in the same processes; commlib's own ring is a ProcessGroupGloo too. "
    f"Targets: {IN_PLACE} at most {LIMIT:.2f} of {DIST}, {FRESH} at most {LIMIT:.2f} of "
    f"{DIST_CLONE}, {BACKEND} at most {LIMIT:.2f} of {DIST}."
)


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here."""
    return None if nproc > 1 else f"{nproc} ranks: expected 2 or more; pass --nproc 2"


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` CPU ranks."""
    return report(launch("gloo", nproc, rounds=rounds), {"nproc": nproc, "rounds": rounds})


def report(sizes: dict[str, Samples], settings: dict[str, int]) -> Report:
    """Turn the samples of each size into a table and findings."""
    bases = (DIST, DIST_CLONE)
    return Report(
        name="gloo",
        caption=CAPTION,
        columns=timing_columns("µs", bases, "size", over=DIST),
        rows=tuple(
            row
            for size, samples in sizes.items()
            for row in timing_rows(samples, bases, 1e6, size, over=DIST)
        ),
        findings=tuple(
            target(f"{size}, {name} / {peer}", ratio(samples[name], samples[peer]).middle, LIMIT)
            for size, samples in sizes.items()
            for name, peer in PEER.items()
        ),
        settings=settings,
    )


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return, on each rank, the samples of every size."""
    with ring_and_group("gloo") as ring:
        group = ring.process_group()
        return {size: _race(group, *work, rounds) for size, work in SIZES.items()}


def _race(group: dist.ProcessGroup, count: int, calls: int, rounds: int) -> dict[str, list[float]]:
    x = torch.zeros(count)
    peers = {
        IN_PLACE: lambda: ops.all_reduce(x, out=x),
        DIST: lambda: dist.all_reduce(x),
        FRESH: lambda: ops.all_reduce(x),
        DIST_CLONE: lambda: dist.all_reduce(x.clone()),
        BACKEND: lambda: dist.all_reduce(x, group=group),
    }
    return race(peers, rounds=rounds, calls=calls)
