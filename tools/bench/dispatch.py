"""Benchmark `dispatch`: tokens to their experts, and back, with counts on the device."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from commlib import CommContext
from commlib.tools.bench.capture_work import by_hand
from commlib.tools.bench.dispatch_work import Work
from commlib.tools.bench.launch import launch
from commlib.tools.bench.pair import backend_for, ring_and_group, settler
from commlib.tools.bench.report import Report, Row, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, race, ratio

ROUNDS = 20
BURST = 10  # calls in one graph
DISPATCH, COMBINE = "dispatch", "combine"
OURS, FP8 = "commlib", "commlib, fp8"
BARE, PEER = "exchange of the same rows, counts on the host", "all_to_all_single, packed"
CALLS = {DISPATCH: (OURS, FP8, BARE, PEER), COMBINE: (OURS, BARE, PEER)}
LIMITS = {BARE: (2.0, 2.0), PEER: (0.5, 0.8)}  # for few tokens, and for many
TOKENS = {"nccl": (128, 4096), "gloo": (8, 32)}
MODEL = {"nccl": (7168, 64, 8), "gloo": (128, 8, 2)}  # width, experts of all ranks, choices
CAPTION = (
    "Time of expert_dispatch and of expert_combine on rank 0: bfloat16 tokens x {width} on each of "
    "{nproc} ranks, {top_k} random experts of {experts} each, {burst} calls after each other, on "
    "GPUs in one CUDA graph, and a synchronisation. {bare}: a dispatch sends each token once to "
    "each rank that has one of its experts, a combine sends sums in float32 back, with fixed "
    "routes; neither copies or adds anything. Peer: torch.distributed.all_to_all_single with split "
    "sizes from the host, one row per choice, index_select before it in both ways and after it, "
    "and a weighted sum at the end of a combine."
)
Found = Mapping[str, Mapping[str, Samples]]  # tokens, then the way


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here."""
    return None if nproc > 1 else f"{nproc} ranks: expected 2 or more; pass --nproc 2"


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one a rank, or small tensors on CPUs where there are fewer."""
    backend = backend_for(nproc)
    found = launch("dispatch", nproc, backend=backend, rounds=rounds)
    return report(found, {"nproc": nproc, "rounds": rounds}, backend)


def report(found: Found, settings: dict[str, int], backend: str) -> Report:
    """Turn the samples of each number of tokens and way into a table and findings."""
    width, experts, top_k = MODEL[backend]
    numbers = {"width": width, "experts": experts, "top_k": top_k, "burst": BURST, "bare": BARE}
    return Report(
        name="dispatch",
        caption=CAPTION.format(**numbers, **settings),
        columns=timing_columns("µs", (BARE, PEER), "tokens", "way"),
        rows=tuple(_rows(found)),
        findings=tuple(_targets(found, on_gpus=backend == "nccl")),
        settings=settings,
    )


def _rows(found: Found) -> Iterator[Row]:
    for tokens, ways in found.items():
        for way, samples in ways.items():
            yield from timing_rows(samples, (BARE, PEER), 1e6, tokens, way)


def _targets(found: Found, *, on_gpus: bool) -> Iterator[str]:
    for number, (tokens, ways) in enumerate(found.items()):
        for way, samples in ways.items():
            for peer, limits in LIMITS.items():
                part = ratio(samples[OURS], samples[peer]).middle
                name = f"{tokens} tokens: expert_{way} / {peer}"
                yield target(name, part, limits[number], measurable=on_gpus)


def measure(backend: str, rounds: int) -> Found:
    """Return, on each rank, the samples of every number of tokens."""
    with ring_and_group(backend) as ring, torch.no_grad():
        return {str(tokens): _samples(ring, tokens, backend, rounds) for tokens in TOKENS[backend]}


def _samples(ring: CommContext, tokens: int, backend: str, rounds: int) -> dict[str, Samples]:
    work = Work(ring, tokens, *MODEL[backend])
    work.check()
    there = work.dispatch, partial(work.dispatch, "fp8"), work.bare_dispatch, work.packed_dispatch
    back = work.combine, work.bare_combine, work.packed_combine
    samples: dict[str, Samples] = {}
    for way, calls in {DISPATCH: there, COMBINE: back}.items():
        named = zip(CALLS[way], calls, strict=True)
        bursts = {name: _burst(call, ring) for name, call in named}
        found = race(bursts, rounds=rounds, calls=1, settle=settler(ring))
        samples[way] = {name: [value / BURST for value in values] for name, values in found.items()}
    return samples


def _burst(call: Callable[[], object], ring: CommContext) -> Callable[[], object]:
    """Return what makes several calls and waits for them."""
    settle = settler(ring)

    def several() -> None:
        for _ in range(BURST):
            call()

    calls: Callable[[], object] = several
    if ring.device.type == "cuda":
        calls = by_hand(several).replay

    def burst() -> None:
        calls()
        settle()

    return burst
