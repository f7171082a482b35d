"""Benchmark `dispatch`: tokens to their experts and back with counts on the device."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commlib import CommContext, ops
from commlib.p2p.expert_tables import local_experts
from commlib.p2p.routes import routes
from commlib.tools.bench.capture_work import by_hand
from commlib.tools.bench.launch import launch
from commlib.tools.bench.pair import backend_for, ring_and_group, settler
from commlib.tools.bench.report import Report, Row, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, race, ratio

ROUNDS = 20
BURST = 10  # pairs in one graph
OURS, FP8 = "expert_dispatch + expert_combine", "the same, fp8 on the way to the experts"
BARE, PEER = "exchange of the same rows, counts on the host", "all_to_all_single, packed"
LIMITS = {BARE: 1.5, PEER: 0.8}
TOKENS = {"nccl": (128, 4096), "gloo": (8, 32)}
MODEL = {"nccl": (7168, 64, 8), "gloo": (128, 8, 2)}  # width, experts of all ranks, choices
CAPTION = (
    "Time of one way there and back on rank 0: bfloat16 tokens x {width} on each of {nproc} ranks, "
    "{top_k} random experts of {experts} each, {burst} pairs after each other, on GPUs in one CUDA "
    "graph, and a synchronisation. {bare} sends each token once to each rank that has one of its "
    "experts, and sums in float32 back, with fixed routes; it copies and adds nothing. Peer: "
    "torch.distributed.all_to_all_single with split sizes from the host, one row per choice, "
    "index_select before and after, and a weighted sum at the end."
)
Call = Callable[[], torch.Tensor]


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here."""
    return None if nproc > 1 else f"{nproc} ranks: expected 2 or more; pass --nproc 2"


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one a rank, or small tensors on CPUs where there are fewer."""
    backend = backend_for(nproc)
    found = launch("dispatch", nproc, backend=backend, rounds=rounds)
    return report(found, {"nproc": nproc, "rounds": rounds}, backend)


def report(found: Mapping[str, Samples], settings: dict[str, int], backend: str) -> Report:
    """Turn the samples of each number of tokens into a table and findings."""
    width, experts, top_k = MODEL[backend]
    numbers = {"width": width, "experts": experts, "top_k": top_k, "burst": BURST, "bare": BARE}
    return Report(
        name="dispatch",
        caption=CAPTION.format(**numbers, **settings),
        columns=timing_columns("µs", (BARE, PEER), "tokens"),
        rows=tuple(_rows(found)),
        findings=tuple(_targets(found, on_gpus=backend == "nccl")),
        settings=settings,
    )


def _rows(found: Mapping[str, Samples]) -> Iterator[Row]:
    for tokens, samples in found.items():
        yield from timing_rows(samples, (BARE, PEER), 1e6, tokens)


def _targets(found: Mapping[str, Samples], *, on_gpus: bool) -> Iterator[str]:
    for tokens, samples in found.items():
        for peer, limit in LIMITS.items():
            part = ratio(samples[OURS], samples[peer]).middle
            yield target(f"{tokens} tokens: {OURS} / {peer}", part, limit, measurable=on_gpus)


def measure(backend: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return, on each rank, the samples of every number of tokens."""
    with ring_and_group(backend) as ring, torch.no_grad():
        return {str(tokens): _samples(ring, tokens, backend, rounds) for tokens in TOKENS[backend]}


def _samples(ring: CommContext, tokens: int, backend: str, rounds: int) -> dict[str, list[float]]:
    work = _Work(ring, tokens, *MODEL[backend])
    pairs: dict[str, Call] = {
        OURS: work.ours,
        FP8: partial(work.ours, "fp8"),
        BARE: work.bare,
        PEER: work.packed,
    }
    for name in (OURS, FP8, PEER):
        apart = float((pairs[name]().float() - work.expected).abs().max())
        if apart > (0.5 if name == FP8 else 0.1):
            raise AssertionError(f"{name}: {apart} from the sums in float32")
    bursts = {name: _burst(pair, ring) for name, pair in pairs.items()}
    found = race(bursts, rounds=rounds, calls=1, settle=settler(ring))
    return {name: [value / BURST for value in values] for name, values in found.items()}


def _burst(pair: Call, ring: CommContext) -> Callable[[], object]:
    """Return what makes several pairs and waits for them."""
    settle = settler(ring)

    def several() -> None:
        for _ in range(BURST):
            pair()

    calls: Callable[[], object] = several
    if ring.device.type == "cuda":
        calls = by_hand(several).replay

    def burst() -> None:
        calls()
        settle()

    return burst


class _Work:
    """The tokens of one rank, their experts, and the ways to exchange them."""

    def __init__(
        self, ring: CommContext, tokens: int, width: int, experts: int, top_k: int
    ) -> None:
        same = torch.Generator().manual_seed(0)  # every rank draws the choices of all
        scores = torch.rand(ring.size, tokens, experts, generator=same)
        ids = scores.topk(top_k, 2).indices
        self.ring, self.experts, self.local = ring, experts, local_experts(experts, ring.size)
        self.capacity = int(ids.view(-1).bincount(minlength=experts).max())
        device = ring.device
        self.x = torch.randn(tokens, width, device=device).bfloat16()
        self.ids = ids[ring.rank].to(device)
        self.weights = torch.full((tokens, top_k), 1 / top_k, device=device)
        self.expected = self.x.float()  # experts return what they get
        self._plan_bare(ids)
        self._plan_packed(ids)
        self.rows = self._dispatched(None).rows

    def _dispatched(self, quantize: str | None) -> Any:
        numbers = self.experts, self.capacity
        how: dict[str, Any] = {"weights": self.weights, "on_overflow": "drop"}
        return ops.expert_dispatch(self.x, self.ids, *numbers, quantize=quantize, **how)

    def ours(self, quantize: str | None = None) -> torch.Tensor:
        """Go there and back; rows in 8 bits are left there, and others go back."""
        sent = self._dispatched(quantize)
        return ops.expert_combine(self.rows if quantize else sent.rows, sent.handle)

    def _plan_bare(self, ids: torch.Tensor) -> None:
        """One row per token and rank of its experts."""
        ranks = torch.nn.functional.one_hot(ids // self.local, self.ring.size).amax(2)
        counts = ranks.sum(1)[..., None].numpy().astype(np.int64)  # [from, to, 1]
        rank = self.ring.rank
        self.there, self.back = (routes(counts, rank, back=back) for back in (False, True))
        tokens = ranks[rank].T.nonzero()[:, 1].to(self.x.device)  # by receiver, then token
        self.sent = self.x[tokens]
        self.held = self.x.new_empty((int(counts[:, rank].sum()), self.x.shape[1]))
        self.sums = self.held.float()
        self.returned = torch.empty_like(self.sent, dtype=torch.float32)

    def bare(self) -> torch.Tensor:
        """Exchange the same bytes."""
        self.ring._exchange_rows(self.held, self.sent, self.there)
        self.ring._exchange_rows(self.returned, self.sums, self.back)
        return self.returned

    def _plan_packed(self, ids: torch.Tensor) -> None:
        """One row per choice, by receiver on the way, by expert there."""
        ring, local, top_k = self.ring, self.local, ids.shape[2]
        flat, device = ids.view(ring.size, -1), self.x.device
        order = flat[ring.rank].argsort(stable=True)
        counts = torch.stack([one.bincount(minlength=ring.size * local) for one in flat])
        table = counts.view(ring.size, ring.size, local)
        self.splits = table[ring.rank].sum(1).tolist(), table[:, ring.rank].sum(1).tolist()
        came = (
            torch.arange(local).repeat(ring.size).repeat_interleave(table[:, ring.rank].reshape(-1))
        )
        sorted_ = came.argsort(stable=True)
        self.out_order, self.choice_order = (order // top_k).to(device), order.argsort().to(device)
        self.by_expert, self.by_sender = sorted_.to(device), sorted_.argsort().to(device)
        self.came = self.x.new_empty((len(came), self.x.shape[1]))
        self.home = self.x.new_empty((len(order), self.x.shape[1]))

    def packed(self) -> torch.Tensor:
        """One message per rank; rows are put in order before and after it."""
        sends, takes = self.splits
        dist.all_to_all_single(self.came, self.x.index_select(0, self.out_order), takes, sends)
        rows = self.came.index_select(0, self.by_expert)
        dist.all_to_all_single(self.home, rows.index_select(0, self.by_sender), sends, takes)
        choices = self.home.index_select(0, self.choice_order).view(*self.ids.shape, -1)
        return (choices * self.weights[..., None]).sum(1).to(self.x.dtype)
