"""Benchmark `host`: what an eager 4-byte all_reduce costs the host of a GPU rank, idle or busy."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from commlib import CommContext, ops
from commlib.tools.bench.busy import busy_host
from commlib.tools.bench.launch import launch
from commlib.tools.bench.machine import gpu_refusal
from commlib.tools.bench.pair import ring_and_group
from commlib.tools.bench.report import Report, Row, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, race, ratio, spread

ROUNDS = 100
CALLS = 200  # fewer than the launches that a GPU's queue holds, else the host waits for the GPU
IN_PLACE, FRESH = "ops.all_reduce(x, out=x)", "ops.all_reduce(x)"
VERB, COMM_STREAM = "comm.all_reduce(out, x)", "ops.all_reduce(x, out=x, use_calc_stream=False)"
BARE, DIST = "bare CuPy", "dist.all_reduce(x)"
SYMM = "symm_mem.one_shot_all_reduce(x)"
IDLE, BUSY = "idle", "busy"
OVER_BARE_US, OF_DIST, OF_SYMM = 2.5, 0.65, 0.9
CAPTION = (
    f"Host time of one 4-byte float32 sum on rank 0, flag on: {CALLS} calls back to back, no "
    f"synchronisation inside a round. idle: nothing else runs; busy: one process per core "
    f"spins. Peers: CuPy's NcclCommunicator.allReduce on the same "
    f"communicator and stream with everything looked up beforehand, torch.distributed on an "
    f"NCCL group of the same ranks in the same processes, and torch's one-shot kernel over "
    f"symmetric memory. Targets for {IN_PLACE} on the idle host: at most "
    f"{OVER_BARE_US:g} µs over {BARE}, at most {OF_DIST:.2f} of {DIST}; on both hosts at most "
    f"{OF_SYMM:.2f} of {SYMM}."
)
FLOAT32, SUM = 7, 0  # ncclDataType_t and ncclRedOp_t

refusal = gpu_refusal


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one a rank."""
    return report(launch("host", nproc, rounds=rounds), {"nproc": nproc, "rounds": rounds})


def report(found: Mapping[str, Samples], settings: dict[str, int]) -> Report:
    """Turn the samples of the idle and the busy host into a table and findings."""
    idle = found[IDLE]
    middle = {name: spread(values).middle * 1e6 for name, values in idle.items()}
    return Report(
        name="host",
        caption=CAPTION,
        columns=timing_columns("µs", (BARE, DIST), "host", over=BARE),
        rows=tuple(_rows(found)),
        findings=(
            target(f"{IN_PLACE} over {BARE}", middle[IN_PLACE] - middle[BARE], OVER_BARE_US, " µs"),
            target(f"{IN_PLACE} / {DIST}", ratio(idle[IN_PLACE], idle[DIST]).middle, OF_DIST),
            *_of_symm(found),
        ),
        settings=settings,
    )


def _rows(found: Mapping[str, Samples]) -> Iterator[Row]:
    for host, samples in found.items():
        yield from timing_rows(samples, (BARE, DIST), 1e6, host, over=BARE)


def _of_symm(found: Mapping[str, Samples]) -> Iterator[str]:
    for host, samples in found.items():
        part = ratio(samples[IN_PLACE], samples[SYMM]).middle
        yield target(f"{host} host, {IN_PLACE} / {SYMM}", part, OF_SYMM)


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return, on each rank, the samples of every peer on the idle and on the busy host."""
    with ring_and_group("nccl") as ring:
        return _measure(ring, rounds)


def _measure(ring: CommContext, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Release the symmetric memory at the end, before the group is destroyed."""
    peers, samples = _peers(ring), {}
    for host in (IDLE, BUSY):
        # One rank keeps all cores busy, and the others wait until it has begun.
        with busy_host() if host == BUSY and ring.rank == 0 else nullcontext():
            ring.exchange([])
            samples[host] = race(peers, rounds=rounds, calls=CALLS, settle=torch.cuda.synchronize)
            ring.exchange([])
    return samples


def _peers(ring: CommContext) -> dict[str, Any]:
    x, out = torch.zeros(1, device=ring.device), torch.zeros(1, device=ring.device)
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    shared = symm_mem.empty(1, device=ring.device)
    symm_mem.rendezvous(shared, group)
    shared.zero_()
    one_shot = torch.ops.symm_mem.one_shot_all_reduce
    ring.connect()
    engine: Any = ring._engine
    bare, ptr = engine._connection.collective(), x.data_ptr()
    stream = torch.cuda.current_stream(ring.device).cuda_stream
    return {
        BARE: lambda: bare.allReduce(ptr, ptr, 1, FLOAT32, SUM, stream),
        VERB: lambda: ring.all_reduce(out, x),
        IN_PLACE: lambda: ops.all_reduce(x, out=x),
        FRESH: lambda: ops.all_reduce(x),
        COMM_STREAM: lambda: ops.all_reduce(x, out=x, use_calc_stream=False),
        DIST: lambda: dist.all_reduce(x),
        SYMM: lambda: one_shot(shared, "sum", group),
    }
