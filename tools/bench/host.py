"""Benchmark `host`: what an eager 4-byte all_reduce costs the host of a GPU rank."""

from typing import Any

import torch
import torch.distributed as dist

from commlib import ops
from commlib.tools.bench.launch import launch
from commlib.tools.bench.machine import gpu_refusal
from commlib.tools.bench.pair import ring_and_group
from commlib.tools.bench.report import Report, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, race, ratio, spread

ROUNDS = 100
CALLS = 200  # fewer than the launches that a GPU's queue holds, else the host waits for the GPU
IN_PLACE, FRESH = "ops.all_reduce(x, out=x)", "ops.all_reduce(x)"
VERB, COMM_STREAM = "comm.all_reduce(out, x)", "ops.all_reduce(x, out=x, use_calc_stream=False)"
BARE, DIST = "bare CuPy", "dist.all_reduce(x)"
OVER_BARE_US, OF_DIST = 3.0, 0.65
CAPTION = (
    f"Host time of one 4-byte float32 sum on rank 0, flag on: {CALLS} calls back to back, no "
    f"synchronisation inside a round. Peers: CuPy's NcclCommunicator.allReduce on the same "
    f"communicator and stream with everything looked up beforehand, and torch.distributed on an "
    f"NCCL group of the same ranks in the same processes. Targets for {IN_PLACE}: at most "
    f"{OVER_BARE_US:g} µs over {BARE}, at most {OF_DIST:.2f} of {DIST}."
)
FLOAT32, SUM = 7, 0  # ncclDataType_t and ncclRedOp_t

refusal = gpu_refusal


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one a rank."""
    return report(launch("host", nproc, rounds=rounds), {"nproc": nproc, "rounds": rounds})


def report(found: Samples, settings: dict[str, int]) -> Report:
    """Turn the samples into a table and findings."""
    bases = (BARE, DIST)
    middle = {name: spread(values).middle * 1e6 for name, values in found.items()}
    return Report(
        name="host",
        caption=CAPTION,
        columns=timing_columns("µs", bases, over=BARE),
        rows=tuple(timing_rows(found, bases, 1e6, over=BARE)),
        findings=(
            target(f"{IN_PLACE} over {BARE}", middle[IN_PLACE] - middle[BARE], OVER_BARE_US, " µs"),
            target(f"{IN_PLACE} / {DIST}", ratio(found[IN_PLACE], found[DIST]).middle, OF_DIST),
        ),
        settings=settings,
    )


def measure(rounds: int) -> dict[str, list[float]]:
    """Return, on each rank, the samples of every peer."""
    with ring_and_group("nccl") as ring:
        return race(_peers(ring), rounds=rounds, calls=CALLS, settle=torch.cuda.synchronize)


def _peers(ring: Any) -> dict[str, Any]:
    x, out = torch.zeros(1, device=ring.device), torch.zeros(1, device=ring.device)
    ring.connect()
    bare, place = ring._engine._connection.collective(), x.data_ptr()
    stream = torch.cuda.current_stream(ring.device).cuda_stream
    return {
        BARE: lambda: bare.allReduce(place, place, 1, FLOAT32, SUM, stream),
        VERB: lambda: ring.all_reduce(out, x),
        IN_PLACE: lambda: ops.all_reduce(x, out=x),
        FRESH: lambda: ops.all_reduce(x),
        COMM_STREAM: lambda: ops.all_reduce(x, out=x, use_calc_stream=False),
        DIST: lambda: dist.all_reduce(x),
    }
