"""Benchmark `llama`: a captured Llama against graphs of torch, and what verified calls cost."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

import commlib
from commlib import CommContext, graph
from commlib.tools.bench.capture import BARE, GRAPHED, OURS, walls
from commlib.tools.bench.capture_work import EAGER, WARM_UPS, Call, by_hand, check
from commlib.tools.bench.launch import launch
from commlib.tools.bench.llama_work import (
    BATCH,
    CACHED,
    HIDDEN,
    LAYERS,
    LENGTH,
    Decoder,
    Passes,
    Training,
)
from commlib.tools.bench.machine import gpu_refusal
from commlib.tools.bench.pair import TIMEOUT
from commlib.tools.bench.report import Report, Row, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, interleave, ratio

ROUNDS, CHECK_ROUNDS = 20, 3
COMPILED, FIRST = "torch.compile, reduce-overhead", "graph.capture, first call"
UNIT = "wall time, µs"
FEW, MANY = 1_000, 10_000  # first steps of a run: one is captured, the others are replays
VERIFIED = {FEW: 4, MANY: 5}  # of these replays: 1, 2, 10, 100, ...
CAPTION = (
    f"A Llama of transformers ({LAYERS} layers of {HIDDEN}, bfloat16, random weights) on {{nproc}} "
    "GPUs, one a rank, flag on, every peer in the same processes, each but torch.compile with the "
    "bits of eager calls. wall time: of one call, calls in a row, by CUDA events, on the slowest "
    "rank. decode: "
    f"one token over a static cache of {CACHED}, layers split over all ranks. pass: forward and "
    f"backward of {BATCH} x {LENGTH} tokens. first call: the first pass of a captured module, with "
    "all runs before the capture and the capture itself, compared with an eager pass. checks: what "
    f"verified calls add to the first {FEW} and {MANY} training steps (forward, backward, clip, "
    f"AdamW) by the default schedule: the time of the {FEW - 1} replays among {FEW} steps with it "
    f"over that with verify=False; for {MANY} steps, by the number of verified calls. All figures "
    "but checks use verify=False."
)


def refusal(nproc: int) -> str | None:
    """Say what is missing here; one rank is enough."""
    missing = find_spec("transformers") is None
    return gpu_refusal(nproc, least=1) or (
        "transformers is not installed; run `pip install '/path/to/commlib[models]'`"
        if missing
        else None
    )


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one a rank."""
    return report(launch("llama", nproc, rounds=rounds), {"nproc": nproc, "rounds": rounds})


# -- what becomes of the samples ------------------------------------------------------------------


class Goal(NamedTuple):
    """The target: at most ``limit`` of the peer's time."""

    kind: str
    ours: str
    peer: str
    limit: float


GOALS = (
    Goal("decode", OURS, BARE, 1.03),
    Goal("pass", OURS, GRAPHED, 1.15),
    Goal("pass", OURS, COMPILED, 1.0),
    Goal("first call", FIRST, EAGER, 12.0),
)
BASES = {"decode": BARE, "pass": GRAPHED, "first call": EAGER}
LIMITS = {FEW: 0.04, MANY: 0.005}  # of checks, by the number of steps


def report(found: dict[str, Any], settings: dict[str, int]) -> Report:
    """Turn the samples of each kind into a table and findings."""
    samples, checks = found["samples"], found["checks"]
    return Report(
        name="llama",
        caption=CAPTION.format(**settings),
        columns=timing_columns("value", ("the target's peer",), "kind", "figure"),
        rows=tuple(_rows(samples)),
        findings=(*_findings(samples), *_of_checks(checks)),
        settings=settings,
    )


def _rows(samples: Mapping[str, Samples]) -> Iterator[Row]:
    for kind, of_kind in samples.items():
        yield from timing_rows(of_kind, (BASES[kind],), 1e6, kind, UNIT)


def _findings(samples: Mapping[str, Samples]) -> Iterator[str]:
    for goal in GOALS:
        of_kind = samples[goal.kind]
        part = ratio(of_kind[goal.ours], of_kind[goal.peer]).middle
        yield target(f"{goal.kind}, {goal.ours} / {goal.peer}", part, goal.limit)


def _of_checks(checks: Mapping[str, float]) -> Iterator[str]:
    for steps, limit in LIMITS.items():
        yield target(f"checks, part of {steps} steps", checks[str(steps)], limit)
    yield (
        f"checks: a training step replays in {checks['replay'] * 1e3:.2f} ms and runs eagerly in "
        f"{checks['eager'] * 1e3:.1f} ms; a verified one takes {checks['each'] * 1e3:.1f} ms and "
        f"at most "
        f"{checks['bytes'] / 2**20:.0f} MiB, a first call {checks['first_bytes'] / 2**20:.0f} MiB"
    )


# -- on each rank ---------------------------------------------------------------------------------


def measure(rounds: int) -> dict[str, Any]:
    """Return, on each rank, the samples of every kind, and what checks cost."""
    ring = commlib.init("nccl", timeout=TIMEOUT)  # makes this rank's GPU the current one
    samples = {
        "decode": _decode(ring, rounds),
        "pass": _pass(ring, rounds),
        "first call": _first_call(ring.device, rounds),
    }
    checks = _checks(ring.device, rounds)
    commlib.shutdown()
    return {"samples": samples, "checks": checks}


def _decode(ring: CommContext, rounds: int) -> Samples:
    decoders = {name: Decoder(ring) for name in (OURS, BARE, EAGER)}
    for each in decoders.values():
        each.next()  # makes the cache
    ours = graph.capture(decoders[OURS].next, verify=False)
    ours()
    bare = by_hand(decoders[BARE].next)
    calls: dict[str, Call] = {OURS: ours, BARE: bare.replay, EAGER: decoders[EAGER].next}
    check("decode", {name: decoders[name].after(call) for name, call in calls.items()})

    def begun(name: str) -> Call:
        def call() -> object:
            decoders[name].begin()
            return calls[name]()

        return call

    samples = walls(ring, {name: begun(name) for name in (OURS, BARE)}, rounds)
    ours.reset()
    bare.reset()
    return samples


def _pass(ring: CommContext, rounds: int) -> Samples:
    passes = {name: Passes(ring.device) for name in (OURS, GRAPHED, COMPILED, EAGER)}
    ours, theirs = graph.capture(passes[OURS], verify=False), passes[GRAPHED]
    forwards: dict[str, Any] = {
        OURS: ours,
        GRAPHED: torch.cuda.make_graphed_callables(theirs, (theirs.tokens,)),
        EAGER: passes[EAGER],
    }
    calls = {name: partial(passes[name].both, forward) for name, forward in forwards.items()}
    for call in calls.values():
        call()
    check("pass", {name: passes[name].after(call) for name, call in calls.items()})
    compiled = torch.compile(passes[COMPILED], mode="reduce-overhead")  # its bits may differ

    def by_compiler() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        return passes[COMPILED].both(compiled)

    peers: dict[str, Call] = {OURS: calls[OURS], GRAPHED: calls[GRAPHED], COMPILED: by_compiler}
    for _ in range(3):
        by_compiler()
    samples = walls(ring, peers, rounds)
    ours.reset()
    return samples


def _first_call(device: torch.device, rounds: int) -> Samples:
    ours, eager = Passes(device), Passes(device)
    captured = graph.capture(ours, verify=False)

    def first() -> float:
        captured.reset()
        return _seconds(partial(ours.both, captured))

    meters: dict[str, Callable[[], float]] = {
        FIRST: first,
        EAGER: partial(_seconds, partial(eager.both, eager)),
    }
    return interleave(meters, rounds=rounds)


def _checks(device: torch.device, rounds: int) -> dict[str, float]:
    """Return what verified calls add to training steps, as a part of their time without any."""
    checked, plain = Training(device), Training(device)
    for training in (checked, plain):
        for _ in range(WARM_UPS):
            training.step()
    results = {"eager": _seconds(checked.step, calls=5)}
    captured, unchecked = graph.capture(checked.step), graph.capture(plain.step, verify=False)
    results["first_bytes"] = _most_bytes(captured)
    captured()
    results["bytes"] = _most_bytes(captured)  # of the second verified call
    unchecked()

    def steps() -> float:
        captured.reset()
        captured()
        return _seconds(captured, calls=FEW - 1)

    meters: dict[str, Callable[[], float]] = {
        OURS: steps,
        BARE: partial(_seconds, unchecked, calls=FEW - 1),
    }
    samples = interleave(meters, rounds=min(rounds, CHECK_ROUNDS))
    part = ratio(samples[OURS], samples[BARE]).middle - 1
    for number, verified in VERIFIED.items():
        results[str(number)] = part * verified / VERIFIED[FEW] * FEW / number
    (row,) = graph.report(captured)
    results["each"] = row["verify_seconds"] / row["verified"]
    results["replay"] = statistics.median(samples[BARE])
    captured.reset()
    unchecked.reset()
    if row["verified"] != VERIFIED[FEW]:
        raise AssertionError(f"{row['verified']} of {FEW} steps were verified")
    return results


def _seconds(call: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds of a call, the mean of some in a row."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / calls


def _most_bytes(call: Callable[[], object]) -> int:
    """Return by how much a call makes what is allocated grow, at most."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
