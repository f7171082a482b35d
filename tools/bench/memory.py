"""Benchmark `memory`: the GPU memory that each communicator takes."""

import importlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

import commlib
from commlib import ops
from commlib.tools.bench.launch import launch
from commlib.tools.bench.machine import gpu_refusal
from commlib.tools.bench.pair import TIMEOUT
from commlib.tools.bench.report import Report, number
from commlib.tools.bench.rounds import spread

ROUNDS = 3
MEBIBYTE = 2**20
UNIFIED, LEGACY, DIST = "flag on", "flag off", "torch.distributed"
NOTHING = "CUDA context, one tensor"
INIT, FIRST_CALL = "commlib.init(): ring 0", "first ops.all_reduce(x)"
CONNECT, SUSPEND, RESUME = "ring.connect()", "ring.suspend()", "ring.resume()"
SECOND, ALONE = "new_ring(1, all ranks), first call", "new_ring(2, [0]): one rank"
GROUP, SECOND_GROUP = "first dist.all_reduce(x)", "dist.new_group(), first call"
CAPTION = (
    "GPU memory that each step takes on rank 0: the fall of torch.cuda.mem_get_info, median and "
    "min..max over fresh processes; and, where pynvml is installed, what NVML counts for the "
    "process so far. Each of the three programs starts fresh. `flag on` adds a torch.distributed "
    "group after its rings. Communicators: live ones in CommContextManager.report(), with their "
    "engine; rings of one rank have none."
)

Step = dict[str, Any]

refusal = gpu_refusal


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one a rank: each program ``rounds`` times, taking turns."""
    runs: dict[str, list[list[Step]]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds):
        for name, repeats in runs.items():
            repeats.append(launch("memory", nproc, unified=name == UNIFIED, program=name))
    return report(runs, {"nproc": nproc, "rounds": rounds})


def report(runs: dict[str, list[list[Step]]], settings: dict[str, int]) -> Report:
    """Turn the steps of each program's runs into a table and findings."""
    columns = ("program", "step", "taken, MiB", "min..max", "process by NVML, MiB")
    return Report(
        name="memory",
        caption=CAPTION,
        columns=(*columns, "communicators", "torch.distributed initialised"),
        rows=tuple(
            _row(program, same)
            for program, repeats in runs.items()
            for same in zip(*repeats, strict=True)
        ),
        findings=_findings(runs[UNIFIED]),
        settings=settings,
    )


def _row(program: str, same: tuple[Step, ...]) -> tuple[str, ...]:
    """Return the row of one step, from each run's figures."""
    last, taken = same[-1], [step["taken"] / MEBIBYTE for step in same]
    process = [step["process"] / MEBIBYTE for step in same if step["process"] is not None]
    return (
        program,
        last["step"],
        number(spread(taken).middle),
        f"{number(min(taken))}..{number(max(taken))}",
        number(spread(process).middle) if process else "not available",
        ", ".join(last["communicators"]) or "none",
        "yes" if last["initialised"] else "no",
    )


def _findings(runs: list[list[Step]]) -> tuple[str, ...]:
    """Say whether the flag keeps torch.distributed from making its own communicator."""
    ours = [step for steps in runs for step in steps if step["step"] != GROUP]
    started = any(step["initialised"] for step in ours)
    engines = {engine for step in ours for engine in step["communicators"]}
    alone = [step["taken"] for step in ours if step["step"] == ALONE]
    return (
        f"flag on, before {GROUP}: torch.distributed initialised: {'yes' if started else 'no'}; "
        f"engines of all communicators: {', '.join(sorted(engines)) or 'none'}",
        f"flag on, {ALONE}: at most {max(alone)} bytes",
    )


class _Usage:
    """The GPU memory taken by each step; the first entry is the process without rings."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        self.x = torch.zeros(1, device=self.device)
        self.steps: list[Step] = []
        self.free = self._free()
        self.note(NOTHING)

    def _free(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.mem_get_info(self.device)[0]

    def note(self, step: str) -> None:
        """Write down what was taken since the last entry."""
        free = self._free()
        rings = commlib.CommContextManager.instance().report()
        self.steps.append(
            {
                "step": step,
                "taken": self.free - free,
                "process": _by_nvml(self.device),
                "communicators": [ring["engine"] for ring in rings if ring["communicator"]],
                "initialised": dist.is_initialized(),
            }
        )
        self.free = free


def measure(program: str) -> list[Step]:
    """Return, on each rank, the steps of ``program``."""
    usage = _Usage()
    PROGRAMS[program](usage)
    if dist.is_initialized():
        dist.destroy_process_group()
    commlib.shutdown()
    return usage.steps


def _rings(usage: _Usage) -> None:
    ring = commlib.init("nccl", timeout=TIMEOUT)
    usage.note(INIT)
    ops.all_reduce(usage.x, out=usage.x)
    usage.note(FIRST_CALL)
    for step in (CONNECT, SUSPEND, RESUME):
        getattr(ring, step.removeprefix("ring.").removesuffix("()"))()
        usage.note(step)
    commlib.new_ring(1, ring.ranks)
    ops.all_reduce(usage.x, 1, out=usage.x)
    usage.note(SECOND)
    commlib.new_ring(2, [0])
    usage.note(ALONE)


def _rings_and_group(usage: _Usage) -> None:
    _rings(usage)
    _first_group(usage)


def _first_group(usage: _Usage) -> None:
    dist.init_process_group("nccl", timeout=TIMEOUT)
    dist.all_reduce(usage.x)
    usage.note(GROUP)


def _groups(usage: _Usage) -> None:
    _first_group(usage)
    dist.all_reduce(usage.x, group=dist.new_group())
    usage.note(SECOND_GROUP)


PROGRAMS: dict[str, Callable[[_Usage], None]] = {
    UNIFIED: _rings_and_group,
    LEGACY: _rings,
    DIST: _groups,
}


def _by_nvml(device: torch.device) -> int | None:
    """Return the bytes that NVML counts for this process; None where it does not say."""
    if find_spec("pynvml") is None:
        return None
    nvml = importlib.import_module("pynvml")
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    except nvml.NVMLError:  # many containers forbid it; the table says "not available"
        return None
    ours = [one.usedGpuMemory for one in processes if one.pid == os.getpid()]
    return ours[0] if ours else None
