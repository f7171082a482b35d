"""Benchmark `experts`: rows to the experts of all ranks and back, against an all-to-all."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import commlib
from commlib import CommContext, flags, ops
from commlib.tools.bench.launch import launch
from commlib.tools.bench.pair import backend_for, ring_and_group, settler
from commlib.tools.bench.report import Report, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, race, ratio

ROUNDS = 30
BURST = 10  # pairs in a row, then one synchronisation: what a busy program sees
OURS, BY_NCCL = "global_scatter + global_gather", "the same, FLAGS_comm_channel_mib=0"
PER_EXPERT, PEER = "a group of sends and receives an expert", "all_to_all_single, packed"
LIMIT = 0.80
OPTIONS = ("rows", "width", "experts")
ON_GPUS, ON_CPUS = (8192, 4096, 16), (256, 64, 8)
CAPTION = (
    "Time of one way there and back on rank 0, flag on: {rows} bfloat16 rows x {width} on each of "
    "{nproc} ranks, {experts} experts in all, random counts held on the CPU, {burst} pairs after "
    "each other and a synchronisation. {ours} compares the counts of all ranks at every call, no "
    "other does. Peer: torch.distributed.all_to_all_single over the same ranks and processes, "
    f"with torch.cat of the parts after it (there) and before it (back). Target on GPUs: {OURS} "
    f"at most {LIMIT:.2f} of {PEER}."
)


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here."""
    return None if nproc > 1 else f"{nproc} ranks: expected 2 or more; pass --nproc 2"


def run(
    nproc: int,
    rounds: int,
    rows: int | None = None,
    width: int | None = None,
    experts: int | None = None,
) -> Report:
    """Measure on ``nproc`` GPUs, one a rank, or on CPUs where there are fewer; other sizes there.

    ``experts`` are those of all ranks together.
    """
    backend = backend_for(nproc)
    usual = ON_GPUS if backend == "nccl" else ON_CPUS
    settings: dict[str, Any] = {"rows": rows or usual[0], "width": width or usual[1]}
    settings["experts"] = experts or usual[2]
    results = launch("experts", nproc, backend=backend, rounds=rounds, **settings)
    return report(results, {"nproc": nproc, "rounds": rounds, **settings}, backend == "nccl")


def report(samples: Samples, settings: dict[str, int], on_gpus: bool) -> Report:
    """Turn the samples into a table and findings."""
    part = ratio(samples[OURS], samples[PEER]).middle
    return Report(
        name="experts",
        caption=CAPTION.format(burst=BURST, ours=OURS, **settings),
        columns=timing_columns("µs", (PEER,)),
        rows=tuple(timing_rows(samples, (PEER,), 1e6)),
        findings=(target(f"{OURS} / {PEER}", part, LIMIT, measurable=on_gpus),),
        settings=settings,
    )


def measure(
    backend: str, rounds: int, rows: int, width: int, experts: int
) -> dict[str, list[float]]:
    """Return, on each rank, the samples of every peer; all give the same rows first."""
    with ring_and_group(backend) as ring:
        work = _Work(ring, rows, width, experts // ring.size)
        pairs = {
            OURS: lambda: work.ours(0),
            BY_NCCL: lambda: work.ours(work.plain.ring_id),
            PER_EXPERT: work.an_expert_at_a_time,
            PEER: work.packed,
        }
        for name, pair in pairs.items():
            if not torch.equal(pair(), work.x):
                raise AssertionError(f"{name}: other rows came back")
        bursts = {name: _burst(pair, settler(ring)) for name, pair in pairs.items()}
        samples = race(bursts, rounds=rounds, calls=1)
        return {name: [value / BURST for value in values] for name, values in samples.items()}


def _burst(pair: Callable[[], Any], settle: Callable[[], Any]) -> Callable[[], None]:
    def burst() -> None:
        for _ in range(BURST):
            pair()
        settle()

    return burst


class _Work:
    """The rows of one rank, their counts, and the ways to exchange them."""

    def __init__(self, ring: CommContext, rows: int, width: int, experts: int) -> None:
        self.ring, self.experts = ring, experts
        torch.manual_seed(0)  # every rank draws the counts of all
        shape = (ring.size, ring.size * experts)
        chosen = torch.randint(shape[1], (ring.size, rows))
        table = torch.stack([row.bincount(minlength=shape[1]) for row in chosen])
        counts = table.view(ring.size, ring.size, experts)
        self.sent = counts[ring.rank]  # [to, expert]
        self.taken = counts[:, ring.rank].contiguous()  # [from, expert]
        self.local, self.expected = self.sent.reshape(-1), self.taken.view(-1)
        self.x = torch.randn(rows, width, device=ring.device).bfloat16()
        with flags.override(flags.CHANNEL, 0):
            plain = commlib.new_ring(1, range(ring.size))
            assert plain is not None
            self.plain = plain
            self.ours(plain.ring_id)  # the first call decides what carries the rows

    def ours(self, ring_id: int) -> torch.Tensor:
        scattered = ops.global_scatter(self.x, self.local, self.expected, ring_id)
        return ops.global_gather(scattered, self.local, self.expected, ring_id)

    def packed(self) -> torch.Tensor:
        """One message a rank; the parts are put in order in their own copy."""
        sends, takes = self.sent.sum(1).tolist(), self.taken.sum(1).tolist()
        came = self.x.new_empty((sum(takes), self.x.shape[1]))
        dist.all_to_all_single(came, self.x, takes, sends)
        scattered = torch.cat(_turned(came, self.taken))
        came = torch.cat(_turned(scattered, self.taken.T))
        back = torch.empty_like(self.x)
        dist.all_to_all_single(back, came, sends, takes)
        return back

    def an_expert_at_a_time(self) -> torch.Tensor:
        """The launches of the legacy operator."""
        scattered = self.x.new_empty((int(self.taken.sum()), self.x.shape[1]))
        back, parts = torch.empty_like(self.x), self.x.split(self.local.tolist())
        self._rounds(parts, scattered.split(self.taken.T.reshape(-1).tolist()), to_experts=True)
        places = back.split(self.local.tolist())
        self._rounds(places, scattered.split(self.taken.T.reshape(-1).tolist()), to_experts=False)
        return back

    def _rounds(
        self,
        held: tuple[torch.Tensor, ...],
        sorted_: tuple[torch.Tensor, ...],
        to_experts: bool,
    ) -> None:
        """``held``: by rank, then expert; ``sorted_``: by expert, then rank."""
        ring, size = self.ring, self.ring.size
        for expert in range(self.experts):
            mine = held[ring.rank * self.experts + expert]
            local_part = sorted_[expert * size + ring.rank]
            (local_part if to_experts else mine).copy_(mine if to_experts else local_part)
            with ring.group():
                for peer in (p for p in range(size) if p != ring.rank):
                    sorted_part = sorted_[expert * size + peer]
                    held_part = held[peer * self.experts + expert]
                    ring.send(held_part if to_experts else sorted_part, peer=peer)
                    ring.recv(sorted_part if to_experts else held_part, peer=peer)


def _turned(rows: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of ``rows``, which stand by the rows of ``counts``, by its columns."""
    parts = rows.split(counts.reshape(-1).tolist())
    columns = counts.shape[1]
    return [parts[row * columns + k] for k in range(columns) for row in range(len(counts))]
