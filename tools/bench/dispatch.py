"""Benchmark `dispatch`: tokens to their experts, and back, with counts on the device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from commlib import CommContext
from commlib.tools.bench.capture_work import by_hand
from commlib.tools.bench.dispatch_work import Work
from commlib.tools.bench.pair import backend_for, ring_and_group, settler
from commlib.tools.bench.peers.expert_ways import ExpertPeers
from commlib.tools.bench.peers.flashinfer_experts import COPIED, FLASHINFER
from commlib.tools.bench.peers.folder import contents
from commlib.tools.bench.peers.launch import launch_with_peers
from commlib.tools.bench.peers.watch import Watch, failures
from commlib.tools.bench.report import Report, Row, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, interleave, meters, ratio

ROUNDS = 20
OPTIONS = ("peers",)
BURST = 10  # calls in one graph; even, as FlashInfer's flags need it
DISPATCH, COMBINE = "dispatch", "combine"
OURS, FP8 = "commlib", "commlib, fp8"
BARE, PEER = "exchange of the same rows, counts on the host", "all_to_all_single, packed"
CALLS = {DISPATCH: (OURS, FP8, BARE, PEER), COMBINE: (OURS, BARE, PEER)}
# For few tokens, and for many; of FlashInfer for few alone.
LIMITS = {BARE: (2.0, 2.0), PEER: (0.5, 0.8), FLASHINFER: (1.0,)}
TOKENS = {"nccl": (128, 4096), "gloo": (8, 32)}
MODEL = {"nccl": (7168, 64, 8), "gloo": (128, 8, 2)}  # width, experts of all ranks, choices
CAPTION = (
    "Time of expert_dispatch and of expert_combine on rank 0: bfloat16 tokens x {width} on each of "
    "{nproc} ranks, {top_k} random experts of {experts} each, {burst} calls after each other, on "
    "GPUs in one CUDA graph, and a synchronisation. {bare}: a dispatch sends each token once to "
    "each rank that has one of its experts, a combine sends sums in float32 back, with fixed "
    "routes; neither copies or adds anything. Peer: torch.distributed.all_to_all_single with split "
    "sizes from the host, one row per choice, index_select before it in both ways and after it, "
    "and a weighted sum at the end of a combine.{libraries}"
)
BY_PEERS = (
    f" Peer by --peers: {FLASHINFER}'s all-to-all for one host, right on these tokens first. It "
    "has a slot for every token of each rank: a dispatch sends each token once to each rank that "
    "has one of its experts, with its choices and weights, and puts no rows in the order of "
    "experts; a combine adds up one bfloat16 row per such rank, which experts have weighted and "
    f"added up. {FLASHINFER}: experts have written these rows into its workspace. {COPIED}: into "
    "other memory, as commlib's."
)
NOT_CALLED = "--peers: not called; the libraries need a GPU per rank"
Found = Mapping[str, Mapping[str, Samples]]  # tokens, then the way
Call = Callable[[], object]


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here."""
    return None if nproc > 1 else f"{nproc} ranks: expected 2 or more; pass --nproc 2"


def run(nproc: int, rounds: int, peers: str | None = None) -> Report:
    """Measure on ``nproc`` GPUs, one a rank, or small tensors on CPUs where there are fewer.

    ``peers`` is a folder of libraries, for GPUs.
    """
    backend = backend_for(nproc)
    folder = peers if backend == "nccl" else None
    results = launch_with_peers("dispatch", nproc, folder, backend=backend, rounds=rounds)
    settings: dict[str, object] = {"nproc": nproc, "rounds": rounds}
    notes: list[str] = []
    if peers is not None:
        settings["peers"] = "FOLDER"
        notes.append(contents(peers, "dispatch") if folder else NOT_CALLED)
    notes.extend(failures(results["failed"]))
    return report(results["tokens"], settings, backend, notes)


def report(
    found: Found, settings: Mapping[str, object], backend: str, notes: Sequence[str] = ()
) -> Report:
    """Turn the samples of each number of tokens and way into a table and findings.

    ``notes`` are findings about the libraries of peers.
    """
    width, experts, top_k = MODEL[backend]
    numbers = {"width": width, "experts": experts, "top_k": top_k, "burst": BURST, "bare": BARE}
    by_peers = any(FLASHINFER in samples for ways in found.values() for samples in ways.values())
    bases = (BARE, PEER, FLASHINFER) if by_peers else (BARE, PEER)
    libraries = BY_PEERS if by_peers else ""
    return Report(
        name="dispatch",
        caption=CAPTION.format(**numbers, nproc=settings["nproc"], libraries=libraries),
        columns=timing_columns("µs", bases, "tokens", "way"),
        rows=tuple(_rows(found, bases)),
        findings=(*_targets(found, on_gpus=backend == "nccl"), *notes),
        settings=settings,
    )


def _rows(found: Found, bases: Sequence[str]) -> Iterator[Row]:
    for tokens, ways in found.items():
        for way, samples in ways.items():
            measured = [base if base in samples else None for base in bases]
            yield from timing_rows(samples, measured, 1e6, tokens, way)


def _targets(found: Found, *, on_gpus: bool) -> Iterator[str]:
    for number, (tokens, ways) in enumerate(found.items()):
        for way, samples in ways.items():
            for peer, limits in LIMITS.items():
                if peer not in samples or number >= len(limits):
                    continue
                part = ratio(samples[OURS], samples[peer]).middle
                name = f"{tokens} tokens: expert_{way} / {peer}"
                yield target(name, part, limits[number], measurable=on_gpus)


# -- on each rank ---------------------------------------------------------------------------------


def measure(
    backend: str, rounds: int, libraries: Mapping[str, str], journal: str, lost: list[str]
) -> dict[str, Any]:
    """Return, on each rank, the samples of every number of tokens, and the peers that failed.

    Args:
        backend: "nccl" or "gloo".
        rounds: How many values each peer gets.
        libraries: Paths of libraries of peers.
        journal: A folder for the peer that each rank runs.
        lost: Peers that ended the ranks before.
    """
    with ring_and_group(backend) as ring, torch.no_grad():
        watch = Watch(ring, journal, lost, settler(ring))
        samples = {
            str(tokens): _samples(Work(ring, tokens, *MODEL[backend]), rounds, watch, libraries)
            for tokens in TOKENS[backend]
        }
        return {"tokens": samples, "failed": watch.failed}


def _samples(
    work: Work, rounds: int, watch: Watch, libraries: Mapping[str, str]
) -> dict[str, Samples]:
    work.check()
    peers = ExpertPeers(work.ring, work.tokens, work.receivers, watch, libraries)
    sends = work.dispatch, partial(work.dispatch, "fp8"), work.bare_dispatch, work.packed_dispatch
    back = work.combine, work.bare_combine, work.packed_combine
    samples: dict[str, Samples] = {}
    for way, calls, more in (
        (DISPATCH, sends, peers.dispatches),
        (COMBINE, back, peers.combines),
    ):
        named: dict[str, Call] = dict(zip(CALLS[way], calls, strict=True))
        label = f"{len(work.x)} tokens, {way}, in a graph"
        samples[way] = _raced(work.ring, named, more, rounds, watch, label)
    return samples


def _raced(
    ring: CommContext,
    named: Mapping[str, Call],
    peers: Mapping[str, Call],
    rounds: int,
    watch: Watch,
    where: str,
) -> Samples:
    """Return the seconds of a call; ``peers`` are those that may fail."""
    bursts = {name: _burst(call, ring) for name, call in named.items()}
    for name, call in peers.items():
        burst = watch.attempt(name, where, partial(_burst, call, ring))
        if burst is not None:
            bursts[name] = burst
    turns = meters(bursts, calls=1, settle=settler(ring))
    for name in peers.keys() & turns.keys():
        turns[name] = watch.meter(name, turns[name])
    samples = interleave(turns, rounds=rounds)
    return {name: [value / BURST for value in values] for name, values in samples.items()}


def _burst(call: Call, ring: CommContext) -> Call:
    """Return what makes several calls and waits for them."""
    settle = settler(ring)

    def several() -> None:
        for _ in range(BURST):
            call()

    calls: Call = several
    if ring.device.type == "cuda":
        calls = by_hand(several).replay

    def burst() -> None:
        calls()
        settle()

    return burst
