"""Benchmark `c10d`: training on the backend "commlib" against torch's own backend."""

import gc
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commlib import CommContext
from commlib.tools.bench.c10d.groups import NAME, OURS, STOCK, both_groups, stock_backend
from commlib.tools.bench.c10d.programs import DDP, FSDP, Step, make_step
from commlib.tools.bench.launch import launch
from commlib.tools.bench.pair import backend_for, ring_and_group, settler, slowest_seconds
from commlib.tools.bench.report import (
    NEEDS_GPUS,
    Report,
    Row,
    target,
    timing_columns,
    timing_rows,
)
from commlib.tools.bench.rounds import Samples, interleave, race, ratio

ROUNDS = 10
CALL = "dist.all_reduce, 4 B"
HOST, STEP, MEMORY = "host time, µs", "step, ms", "memory, MiB"
UNITS = {HOST: 1e6, STEP: 1e3, MEMORY: 2**-20}  # The units in a second, and in a byte.
CALLS = 200  # This is fewer launches than a GPU's queue holds: else the host waits for the GPU.
STEPS = {DDP: 5, FSDP: 2}  # The steps of a turn.
FACTORS = {DDP: 1, FSDP: 4}  # Those of the rounds: the time of one turn of FSDP2 varies by a fifth.
CHECKED = 3  # The losses of these steps are compared.
NEAR = 0.01  # A part of the loss: kernels of attention add in any order.
IN_GROUPS = {OURS: NAME, STOCK: "nccl"}  # Names for init_process_group, on GPUs.
CAPTION = (
    "Programs of torch.distributed on {nproc} ranks on {place}, flag on: the group of a ring, and "
    "stock {stock}, in the same processes. host time: of one float32 sum of one element on rank "
    f"0, {CALLS} calls back to back, no synchronisation inside a round. step: on the slowest rank. "
    f"{DDP}: 77 linear layers 576 x 576 with ReLU (25.6 M float32 parameters, as many as "
    f"ResNet-50), 4096 rows, SGD. {FSDP}: fully_shard of a GPT with 18 blocks of width 2048 (1.0 "
    f"B parameters), 2 x 1024 tokens, bfloat16, AdamW, {FACTORS[FSDP]} times the rounds. On CPUs "
    "both are tiny. memory: the fall of torch.cuda.mem_get_info from before init_process_group "
    "until the last step, on the GPU where it is most, in fresh processes with one backend, on "
    "GPUs alone."
)


class Goal(NamedTuple):
    """The target: at most ``limit`` of the stock backend's figure."""

    program: str
    figure: str
    limit: float


GOALS = (
    Goal(CALL, HOST, 0.6),
    *(Goal(program, STEP, 1.02) for program in (DDP, FSDP)),
    *(Goal(program, MEMORY, 1.0) for program in (DDP, FSDP)),
)
Found = Mapping[str, Mapping[str, Samples]]  # program -> figure -> peer -> values


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here."""
    return None if nproc > 1 else f"{nproc} ranks: expected 2 or more; pass --nproc 2"


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one per rank, or tiny programs on CPUs where there are fewer."""
    backend = backend_for(nproc)
    results = launch("c10d.training", nproc, backend=backend, rounds=rounds)
    if backend == "nccl":
        for peer, name in IN_GROUPS.items():
            taken = launch("c10d.memory", nproc, backend=name)
            for program, size in taken.items():
                results[program].setdefault(MEMORY, {})[peer] = [size]
    return report(results, {"nproc": nproc, "rounds": rounds}, backend)


def report(found: Found, settings: dict[str, int], backend: str) -> Report:
    """Turn the samples of each program into a table and findings."""
    return Report(
        name="c10d",
        caption=CAPTION.format(**stock_backend(backend), **settings),
        columns=timing_columns("value", (STOCK,), "program", "figure"),
        rows=tuple(_rows(found)),
        findings=tuple(_findings(found, backend == "nccl")),
        settings=settings,
    )


def _rows(found: Found) -> Iterator[Row]:
    for program, figures in found.items():
        for figure, samples in figures.items():
            yield from timing_rows(samples, (STOCK,), UNITS[figure], program, figure)


def _findings(found: Found, on_gpus: bool) -> Iterator[str]:
    for goal in GOALS:
        label = f"{goal.program}, {goal.figure.partition(',')[0]}, {OURS} / {STOCK}"
        samples = found[goal.program].get(goal.figure)
        if samples is None:
            yield f"{NEEDS_GPUS}: {label}"
        else:
            part = ratio(samples[OURS], samples[STOCK]).middle
            yield target(label, part, goal.limit, measurable=on_gpus)


# -- on each rank ---------------------------------------------------------------------------------


def measure(backend: str, rounds: int) -> dict[str, dict[str, Samples]]:
    """Return, on each rank, the samples of all programs, without memory."""
    with ring_and_group(backend) as ring:
        return {
            CALL: {HOST: _calls(ring, rounds)},
            **{program: {STEP: _steps(ring, program, rounds)} for program in (DDP, FSDP)},
        }


def _calls(ring: CommContext, rounds: int) -> Samples:
    x = torch.zeros(1, device=ring.device)
    calls = {
        name: partial(dist.all_reduce, x, group=group) for name, group in both_groups(ring).items()
    }
    return race(calls, rounds=rounds, calls=CALLS, settle=settler(ring))


def _steps(ring: CommContext, program: str, rounds: int) -> Samples:
    steps: dict[str, Step] = {
        name: make_step(program, group, ring.device) for name, group in both_groups(ring).items()
    }
    check(program, {name: [float(step()) for _ in range(CHECKED)] for name, step in steps.items()})
    meters = {
        name: partial(slowest_seconds, ring, step, STEPS[program]) for name, step in steps.items()
    }
    samples = interleave(meters, rounds=rounds * FACTORS[program])
    del meters, steps
    gc.collect()  # models go before the groups that they use
    return samples


def check(program: str, losses: Mapping[str, Any]) -> None:
    """Raise ``AssertionError`` where the backends lead to other losses."""
    for ours, stock in zip(losses[OURS], losses[STOCK], strict=True):
        if not abs(ours - stock) <= NEAR * abs(stock):
            raise AssertionError(f"{program}: losses {losses[OURS]}, expected {losses[STOCK]}")
