"""Benchmark `decode`: a token through a 70B decoder, split over all ranks, against NCCL by hand."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from commlib import CommContext, graph, ops
from commlib.compat import paddle
from commlib.ops.inference import ContiguousCache, DecoderConfig, DecoderLayer, rotary_tables
from commlib.ops.inference._fused_multi_transformer import (
    NormWeights,
    Reduce,
    decode_layers,
    normalise,
)
from commlib.ops.inference.attention import prepare
from commlib.tools.bench.capture_work import Call, by_hand
from commlib.tools.bench.launch import launch
from commlib.tools.bench.pair import backend_for, ring_and_group, slowest_seconds
from commlib.tools.bench.report import Report, Row, number, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, interleave, ratio, spread

ROUNDS = 10
OURS = "ops.fused_multi_transformer, graph.capture"
BY_NCCL, LEGACY = "dist.all_reduce, CUDAGraph by hand", "c_allreduce_sum, eager"
REDUCTIONS, BARE = "reductions with norms alone", "ring.all_reduce(out, x) alone"
BATCHES = (1, 8, 64)
ON_GPUS = DecoderConfig(8192, heads=64, kv_heads=8, head_dim=128, inner=28672, eps=1e-5)
ON_CPUS = DecoderConfig(128, heads=8, kv_heads=8, head_dim=16, inner=256, eps=1e-5)
LAYERS, LAYERS_ON_CPUS = 80, 2
CAPACITY, CAPACITY_ON_CPUS = 512, 16
CALLS = 5  # in a row in a turn
FREE = 0.8  # of the memory that is free, for weights and caches
NEAR = 0.1  # of the largest output: bfloat16 sums that are rounded in another order
LIMITS = {BY_NCCL: 0.8, LEGACY: 0.35}
SLACK = 1.1  # of the bare sums, for the reductions with norms
Tensor = torch.Tensor
CAPTION = (
    "Time of one decode step on the slowest rank, {calls} in a row, flag on: {layers} layers of "
    "hidden {hidden} (Llama 70B: 80 of 8192), {dtype} random weights, split over {nproc} ranks on"
    " {device}, a token per sequence at the last position of a cache of {capacity}. Peers, with "
    "the same weights and cache, by torch operators, in the same processes: "
    "torch.distributed.all_reduce, then residual and norm, captured by torch.cuda.graph (eager on"
    " CPUs); and compat.paddle.c_allreduce_sum with the same operators, eager. alone: the 2 x "
    "layers reductions of a step without the rest, captured, and as many bare sums of the same "
    "bytes."
)


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here."""
    if nproc < 1:
        return f"{nproc} ranks: expected 1 or more; pass --nproc 2"
    return (ON_GPUS if backend_for(nproc) == "nccl" else ON_CPUS).fault(nproc)


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one a rank, or a tiny decoder on CPUs where there are fewer."""
    backend = backend_for(nproc)
    results = launch("decode", nproc, backend=backend, rounds=rounds)
    return report(results, {"nproc": nproc, "rounds": rounds}, backend == "nccl")


def report(found: dict[str, Any], settings: dict[str, int], on_gpus: bool) -> Report:
    """Turn the samples of each batch into a table and findings."""
    samples: Mapping[str, Samples] = found["samples"]
    device = "GPUs" if on_gpus else "CPUs"
    return Report(
        name="decode",
        caption=CAPTION.format(calls=CALLS, device=device, **found["model"], **settings),
        columns=timing_columns("µs", (BY_NCCL, LEGACY), "batch"),
        rows=tuple(_rows(samples)),
        findings=(*_targets(samples, on_gpus), *_reductions(samples, on_gpus)),
        settings=settings,
    )


def _rows(samples: Mapping[str, Samples]) -> Iterator[Row]:
    for batch, times in samples.items():
        yield from timing_rows(times, (BY_NCCL, LEGACY), 1e6, batch)


def _targets(samples: Mapping[str, Samples], on_gpus: bool) -> Iterator[str]:
    for peer, limit in LIMITS.items():
        worst = max(ratio(times[OURS], times[peer]).middle for times in samples.values())
        name = f"{OURS} / {peer}, worst batch"
        yield target(name, worst, limit, measurable=on_gpus)


def _reductions(samples: Mapping[str, Samples], on_gpus: bool) -> Iterator[str]:
    worst = max(ratio(times[REDUCTIONS], times[BARE]).middle for times in samples.values())
    yield target(f"{REDUCTIONS} / {BARE}, worst batch", worst, SLACK, measurable=on_gpus)
    for batch, times in samples.items():
        alone, bare, step = (spread(times[name]).middle * 1e6 for name in (REDUCTIONS, BARE, OURS))
        yield (
            f"batch {batch}: reductions with norms {number(alone)} µs, {alone / step:.0%} of a "
            f"step; bare sums {number(bare)} µs"
        )


# -- on each rank ---------------------------------------------------------------------------------


def measure(backend: str, rounds: int) -> dict[str, Any]:
    """Return, on each rank, the samples of every batch, and the shape of the model."""
    with ring_and_group(backend) as ring, torch.no_grad():
        work = Work(ring)
        samples = {str(batch): _samples(work, batch, rounds) for batch in BATCHES}
        model = {
            "layers": len(work.layers),
            "hidden": work.config.hidden,
            "dtype": str(work.dtype).removeprefix("torch."),
            "capacity": work.capacity,
        }
        return {"samples": samples, "model": model}


def _samples(work: "Work", batch: int, rounds: int) -> Samples:
    ring, step = work.ring, Step(work, batch)
    captured = {
        name: graph.capture(call, verify=False, first="warmup")
        for name, call in (
            (OURS, step.ours),
            (REDUCTIONS, step.reductions),
            (BARE, step.bare),
        )
    }
    graphs: list[torch.cuda.CUDAGraph] = []
    peer: Call = step.by_nccl
    if ring.device.type == "cuda":
        graphs.append(by_hand(step.by_nccl))
        peer = graphs[0].replay
    calls: dict[str, Call] = {OURS: captured[OURS], BY_NCCL: peer, LEGACY: step.legacy}
    _check({name: step.after(call) for name, call in calls.items()})
    calls |= {name: captured[name] for name in (REDUCTIONS, BARE)}
    meters = {name: partial(slowest_seconds, ring, call, CALLS) for name, call in calls.items()}
    samples = interleave(meters, rounds=rounds)
    for ours in captured.values():
        ours.reset()
    for by_torch in graphs:
        by_torch.reset()  # before the communicator that it uses is closed
    return samples


def _check(found: Mapping[str, Tensor]) -> None:
    """Raise ``AssertionError`` where a way is not near the eager one."""
    exact = found[LEGACY].float()
    for name, y in found.items():
        apart = float((y.float() - exact).abs().max() / exact.abs().max())
        if not apart <= NEAR:
            raise AssertionError(f"{name}: {apart} of the largest output apart from {LEGACY}")


class Work:
    """One rank's random weights, as many layers as fit, and a cache for the largest batch."""

    def __init__(self, ring: CommContext) -> None:
        on_gpu = ring.device.type == "cuda"
        self.ring, self.config = ring, ON_GPUS if on_gpu else ON_CPUS
        self.capacity = CAPACITY if on_gpu else CAPACITY_ON_CPUS
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.draw = torch.Generator(ring.device).manual_seed(1 + ring.rank)
        count = self._fitting() if on_gpu else LAYERS_ON_CPUS
        self.layers = [self._layer() for _ in range(count)]
        self.cache = ContiguousCache.zeros(
            self.config,
            layers=count,
            sequences=max(BATCHES),
            capacity=self.capacity,
            ranks=ring.size,
            dtype=self.dtype,
            device=ring.device,
        )
        width = self.config.head_dim
        self.rotary = rotary_tables(width, self.capacity, device=ring.device)
        self.norm = torch.ones(self.config.hidden, dtype=self.dtype, device=ring.device)

    def _fitting(self) -> int:
        """Return how many layers fit on every rank."""
        config, size = self.config, self.ring.size
        weights = sum(
            torch.Size(shape).numel()
            for name, shape in DecoderLayer.shapes(config, size).items()
            if not name.endswith("bias")
        )
        row = config.local_kv_heads(size) * config.head_dim
        layer = (weights + 2 * max(BATCHES) * self.capacity * row) * self.dtype.itemsize
        free, _ = torch.cuda.mem_get_info(self.ring.device)
        least = min(each for (each,) in self.ring.exchange([int(free * FREE)]))
        return min(LAYERS, least // layer)

    def _layer(self) -> DecoderLayer:
        weights = {}
        for name, shape in DecoderLayer.shapes(self.config, self.ring.size).items():
            if name.endswith("bias"):
                continue
            values = torch.empty(shape, dtype=self.dtype, device=self.ring.device)
            if len(shape) == 1:
                weights[name] = values.fill_(1)
            else:
                weights[name] = values.normal_(0, shape[-1] ** -0.5, generator=self.draw)
        return DecoderLayer(**weights)


class Step:
    """One decode step of a batch, in each way; ``y`` is the result of the last one."""

    def __init__(self, work: Work, batch: int) -> None:
        self.work, device = work, work.ring.device
        same = torch.Generator(device).manual_seed(0)
        shape = (batch, 1, work.config.hidden)
        self.x = torch.randn(shape, device=device, generator=same).to(work.dtype)
        self.start = torch.full((batch,), work.capacity - 1, device=device)
        self.y = torch.empty_like(self.x)
        self.out = torch.empty_like(self.x)

    def ours(self) -> None:
        """One operator."""
        work = self.work
        self.y.copy_(
            ops.fused_multi_transformer(
                self.x,
                work.layers,
                work.cache,
                work.ring,
                config=work.config,
                start=self.start,
                rotary=work.rotary,
                final_norm=work.norm,
                check_positions=False,
            )
        )

    def by_nccl(self) -> None:
        """Sum in place by torch.distributed."""
        self._composed(partial(self._summed, _in_place))

    def legacy(self) -> None:
        """Sum by the legacy operator."""
        self._composed(partial(self._summed, lambda x: paddle.c_allreduce_sum(x, 0, True)))

    def _composed(self, reduce: Reduce) -> None:
        work, positions = self.work, self.start[:, None]
        attention = prepare(
            work.cache, work.config.head_dim, positions, work.rotary, self.x, False, kernels=False
        )
        args = work.layers, attention, reduce, work.config, work.norm, None
        y = decode_layers(self.x, *args, linear=F.linear)
        self.y.copy_(y)

    def _summed(
        self,
        add: Callable[[Tensor], Tensor],
        x: Tensor,
        residual: Tensor,
        norm: NormWeights,
        linear_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum, and the sum; these layers have no biases."""
        total = add(x) + residual
        return normalise(total, norm, self.work.config), total

    def reductions(self) -> None:
        """Make the reductions of a step, one after the other."""
        y, work = self.x, self.work
        for _ in range(2 * len(work.layers)):
            y, _ = ops.all_reduce_residual_norm(y, self.x, work.norm, work.ring)

    def bare(self) -> None:
        """Make as many sums, without residual and norm."""
        for _ in range(2 * len(self.work.layers)):
            self.work.ring.all_reduce(self.out, self.x)

    def after(self, call: Call) -> Tensor:
        """Return the result of one call."""
        call()
        return self.y.clone()


def _in_place(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x
