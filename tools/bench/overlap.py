"""Benchmark `overlap`: what compute keeps of its speed while an asynchronous all_reduce runs."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

import commlib
from commlib import CommContext
from commlib.tools.bench.launch import launch
from commlib.tools.bench.machine import gpu_refusal
from commlib.tools.bench.pair import TIMEOUT
from commlib.tools.bench.report import Report, Row, number, with_range
from commlib.tools.bench.rounds import Samples, interleave, ratio, spread

ROUNDS = 10
ALONE, OURS, NCCL = "alone", "push kernels", "NCCL"
LATE, QUEUED = "a peer is late", "all_reduces queued"
LATE_S = 0.03  # longer than the compute of a turn
CALLS, MEBIBYTES = 8, 16  # all_reduces of `QUEUED`, and the size of each
KEPT = 0.8
CAPTION = (
    "Compute on the current stream during an asynchronous all_reduce of "
    f"{MEBIBYTES} MiB on the ring's stream, {{nproc}} GPUs, one a rank, by CUDA events on rank 0. "
    "kept: time alone over time with the all_reduce, medians, with p10..p90 of the rounds. "
    f"{LATE}: the last rank makes its call {LATE_S * 1e3:.0f} ms after rank 0, whose compute has "
    f"ended by then. {QUEUED}: {CALLS} calls on every rank before the compute. {NCCL}: the same "
    "calls on a ring with FLAGS_custom_allreduce=0."
)

refusal = gpu_refusal


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one a rank."""
    return report(launch("overlap", nproc, rounds=rounds), {"nproc": nproc, "rounds": rounds})


# -- what becomes of the samples ------------------------------------------------------------------


def report(found: dict[str, Samples], settings: dict[str, int]) -> Report:
    """Turn the seconds of each kind of compute into a table and findings."""
    heads = ("compute", "during", "all_reduce by")
    return Report(
        name="overlap",
        caption=CAPTION.format(nproc=settings["nproc"]),
        columns=(*heads, "alone, ms", "with it, ms", "kept (p10..p90)"),
        rows=tuple(row for kind, samples in found.items() for row in _rows(kind, samples)),
        findings=tuple(_finding(kind, samples) for kind, samples in found.items()),
        settings=settings,
    )


def _rows(kind: str, samples: Samples) -> list[Row]:
    alone = samples[ALONE]
    return [
        (
            *(kind, *case.split(" | ")),
            *(number(1e3 * spread(values).middle) for values in (alone, taken)),
            with_range(ratio(alone, taken)),
        )
        for case, taken in samples.items()
        if case != ALONE
    ]


def _finding(kind: str, samples: Samples) -> str:
    """Say whether compute keeps its share while a peer is late."""
    ours, nccl = (
        ratio(samples[ALONE], samples[f"{LATE} | {peer}"]).middle for peer in (OURS, NCCL)
    )
    met = "met" if ours >= KEPT else "missed"
    return f"{met}: {kind}, {LATE}: keeps {number(ours)}, target at least {KEPT}; {NCCL} {nccl:.2f}"


# -- what a rank does -----------------------------------------------------------------------------


class _Compute(NamedTuple):
    """One operator, and how often it runs in a turn."""

    call: Callable[[], object]
    times: int

    def run(self) -> None:
        for _ in range(self.times):
            self.call()


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each kind of compute, alone and with each all_reduce."""
    home = commlib.init("nccl", timeout=TIMEOUT)
    with commlib.flags.override("FLAGS_custom_allreduce", False):
        plain = commlib.new_ring(1, home.ranks)
    assert plain is not None  # every rank is a member
    turn = _Turn({OURS: home, NCCL: plain})
    samples = {kind: turn.race(compute, rounds) for kind, compute in _computes(home.device).items()}
    commlib.shutdown()
    return samples


def _computes(device: torch.device) -> dict[str, _Compute]:
    draw = partial(torch.randn, dtype=torch.bfloat16, device=device)
    small, large = draw(4096, 4096), draw(8192, 8192)
    heads, values = draw(8, 16, 2048, 64), draw(64 << 20)
    return {
        "matmul 4096": _Compute(lambda: torch.mm(small, small), 40),
        "matmul 8192": _Compute(lambda: torch.mm(large, large), 6),
        "attention": _Compute(lambda: scaled_dot_product_attention(heads, heads, heads), 20),
        "softmax": _Compute(lambda: torch.softmax(small, -1), 200),
        "elementwise": _Compute(lambda: values.mul_(1.0), 80),
    }


class _Turn:
    """One turn of compute on a rank, with or without an asynchronous all_reduce."""

    def __init__(self, rings: dict[str, CommContext]) -> None:
        self.rings = rings
        self.ring = rings[OURS]
        self.x = torch.ones(MEBIBYTES << 19, dtype=torch.bfloat16, device=self.ring.device)
        self.out = torch.empty_like(self.x)
        for ring in rings.values():
            ring.all_reduce(self.out, self.x)  # what the first call makes is there

    def race(self, compute: _Compute, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of each turn, one value a round."""
        meters: dict[str, Callable[[], float]] = {ALONE: partial(self._timed, compute)}
        for name, ring in self.rings.items():
            meters[f"{LATE} | {name}"] = partial(self._timed, compute, ring, late=True)
            meters[f"{QUEUED} | {name}"] = partial(self._timed, compute, ring)
        return interleave(meters, rounds=rounds)

    def _timed(
        self, compute: _Compute, ring: CommContext | None = None, *, late: bool = False
    ) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.ring.exchange([])  # the ranks start together
        if late and self.ring.rank == self.ring.size - 1:
            time.sleep(LATE_S)
        start.record()
        works = [] if ring is None else self._begin(ring, 1 if late else CALLS)
        compute.run()
        end.record()
        end.synchronize()
        for work in works:
            work.wait()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _begin(self, ring: CommContext, calls: int) -> list[commlib.Work]:
        return [
            ring.all_reduce(self.out, self.x, use_calc_stream=False, sync_op=False)
            for _ in range(calls)
        ]
