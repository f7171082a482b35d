"""Benchmark `compiled`: compiled code in our graphs, against the same code in Inductor's."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch._inductor

import commlib
from commlib import CommContext, graph
from commlib.tools.bench.capture import HOST, WALL, walls
from commlib.tools.bench.capture_work import BATCH, EAGER, FEATURES, LAYERS, Call, Passes, check
from commlib.tools.bench.launch import launch
from commlib.tools.bench.machine import gpu_refusal
from commlib.tools.bench.pair import TIMEOUT
from commlib.tools.bench.report import Report, Row, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, race, ratio

ROUNDS = 20
OURS, THEIRS = "backend=commlib.graph.backend", "mode=reduce-overhead"
ALONE = "torch.compile"  # no graph
BURST, WARM_UPS = 50, 5
Forward = Callable[[torch.Tensor], torch.Tensor]
CAPTION = (
    f"torch.compile of {LAYERS} linear layers {FEATURES} x {FEATURES} with ReLU, batch {BATCH}, on "
    "{nproc} GPUs, one a rank, every peer in the same processes; ours has the bits of compiled "
    "code without graphs, and checks no replay. pass: forward and backward, into gradients that "
    "are there; wall time of one of 20 calls by CUDA events, on the slowest rank. forward: "
    f"without gradients; host time of one of {BURST} calls back to back, no synchronisation inside."
)


class Goal(NamedTuple):
    """The target: at most ``limit`` of the time of Inductor's graphs."""

    kind: str
    figure: str
    limit: float


GOALS = (Goal("pass", WALL, 1.0), Goal("forward", HOST, 0.3))


def refusal(nproc: int) -> str | None:
    """Say what is missing here; one rank is enough."""
    return gpu_refusal(nproc, least=1)


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one a rank."""
    return report(launch("compiled", nproc, rounds=rounds), {"nproc": nproc, "rounds": rounds})


def report(samples: Mapping[str, Samples], settings: dict[str, int]) -> Report:
    """Turn the samples of each kind into a table and findings."""
    return Report(
        name="compiled",
        caption=CAPTION.format(**settings),
        columns=timing_columns("value", (THEIRS,), "kind", "figure"),
        rows=tuple(_rows(samples)),
        findings=tuple(_findings(samples)),
        settings=settings,
    )


def _rows(samples: Mapping[str, Samples]) -> Iterator[Row]:
    for goal in GOALS:
        yield from timing_rows(samples[goal.kind], (THEIRS,), 1e6, goal.kind, goal.figure)


def _findings(samples: Mapping[str, Samples]) -> Iterator[str]:
    for goal in GOALS:
        part = ratio(samples[goal.kind][OURS], samples[goal.kind][THEIRS]).middle
        label = f"{goal.kind}, {goal.figure.partition(',')[0]}, {OURS} / {THEIRS}"
        yield target(label, part, goal.limit)


# -- on each rank ---------------------------------------------------------------------------------


def measure(rounds: int) -> dict[str, Any]:
    """Return, on each rank, the samples of both kinds."""
    ring = commlib.init("nccl", timeout=TIMEOUT)  # makes this rank's GPU the current one
    passes = {name: Passes(ring.device) for name in (OURS, THEIRS, ALONE)}
    forwards: dict[str, Forward] = {
        OURS: compiled(passes[OURS]),
        THEIRS: _in_steps(by_inductor(passes[THEIRS], "reduce-overhead")),
        ALONE: by_inductor(passes[ALONE]),
    }
    samples = {
        "pass": _passes(ring, passes, forwards, rounds),
        "forward": _forwards(passes, forwards, rounds),
    }
    torch.compiler.reset()  # releases the graphs of all compiled code
    commlib.shutdown()
    return samples


def compiled(work: Passes) -> Forward:
    """Compile a module for our graphs."""
    options: dict[str, Any] = {"verify": False, "on_fail": "raise", **fixed_kernels()}
    forward: Forward = torch.compile(work.module, backend=graph.backend, options=options)
    return forward


def by_inductor(work: Passes, mode: str = "default") -> Forward:
    """Compile a module as a mode of ``torch.compile`` does, into the same kernels."""
    options = {**torch._inductor.list_mode_options(mode), **fixed_kernels()}
    forward: Forward = torch.compile(work.module, options=options)
    return forward


def fixed_kernels() -> dict[str, Any]:
    """Return settings of Inductor with which no measurement chooses a kernel, and so its bits.

    As options they hold for one compilation. ``torch._inductor.config.deterministic`` does not
    last: Dynamo sets it back after each function that it traces.
    """
    name = "deterministic"
    return {name: True} if name in torch._inductor.list_options() else {}


def _in_steps(forward: Forward) -> Forward:
    """Tell Inductor's graphs where a step begins: what the last one has returned may go."""

    def call(x: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        output: torch.Tensor = forward(x)
        return output

    return call


def _passes(
    ring: CommContext,
    passes: Mapping[str, Passes],
    forwards: Mapping[str, Forward],
    rounds: int,
) -> Samples:
    calls: dict[str, Call] = {
        name: partial(passes[name].both, forward) for name, forward in forwards.items()
    }
    _warm_up(calls)
    results = {
        name: passes[name].after(partial(passes[name].both, forwards[name]))
        for name in (OURS, ALONE)
    }
    check("pass", {OURS: results[OURS], EAGER: results[ALONE]})
    return walls(ring, calls, rounds)


def _forwards(
    passes: Mapping[str, Passes],
    forwards: Mapping[str, Forward],
    rounds: int,
) -> Samples:
    calls: dict[str, Call] = {
        name: torch.no_grad()(partial(forward, passes[name].x))
        for name, forward in forwards.items()
    }
    _warm_up(calls)
    return race(calls, rounds=rounds, calls=BURST, settle=torch.cuda.synchronize)


def _warm_up(calls: Mapping[str, Call]) -> None:
    for call in calls.values():
        for _ in range(WARM_UPS):
            call()
