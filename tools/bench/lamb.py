"""Benchmark `lamb`: a step of the sharded LAMB optimizer against foreach LAMB on every rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from commlib import CommContext, graph, ops
from commlib.tools.bench.lamb_peer import ForeachLamb
from commlib.tools.bench.launch import launch
from commlib.tools.bench.pair import backend_for, ring_and_group, settler
from commlib.tools.bench.report import Report, number, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import race, ratio

ROUNDS = 20
CALLS = 5  # per round
OURS, CAPTURED = "ops.DistributedFusedLamb", "ops.DistributedFusedLamb, captured"
PEER = "foreach LAMB, bucketed all_reduce"
LIMIT, MEMORY = 0.50, 0.60
CLOSE = 2**-6  # of the largest weight: bfloat16 weights after two steps
OPTIONS = ("width",)
LAYERS, LARGE, ON_GPUS, ON_CPUS = 24, 1024, 1024, 32  # BERT-large has a width of 1024
HOW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "max_grad_norm": 1.0}
CAPTION = (
    "Time of one optimizer step on rank 0, flag on, synchronised after every step: the gradients "
    "are there, the new weights are on every rank. The parameters of BERT-large with a hidden size "
    "of {width} in bfloat16, {nproc} ranks on {device}. Peer, in the same processes: the "
    "gradients averaged by one torch.distributed all_reduce per bucket of 25 MiB, all in flight at "
    "once, without a backward that they overlap; then LAMB by torch._foreach operators with "
    "float32 weights and moments on every rank. Memory: of the parameters, the gradients, the "
    "float32 weights and the moments, on a rank. "
    f"Targets with a width of {LARGE}: at most {LIMIT:.2f} of its time, {MEMORY:.2f} of its memory."
)


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here."""
    return None if nproc > 0 else f"{nproc} ranks: expected 1 or more; pass --nproc 2"


def run(nproc: int, rounds: int, width: int | None = None) -> Report:
    """Measure on ``nproc`` GPUs, or on CPUs if there are fewer, with a smaller model.

    Args:
        nproc: Ranks.
        rounds: Rounds.
        width: Hidden size.
    """
    backend = backend_for(nproc)
    width = width or (ON_GPUS if backend == "nccl" else ON_CPUS)
    results = launch("lamb", nproc, backend=backend, rounds=rounds, width=width)
    device = "GPUs" if backend == "nccl" else "CPUs"
    return report(results, {"nproc": nproc, "rounds": rounds, "width": width}, device)


def report(found: dict[str, Any], settings: dict[str, int], device: str) -> Report:
    """Turn times and bytes into a table and findings."""
    times, memory, state = found["times"], found["memory"], found["state"]
    part = ratio(times[CAPTURED], times[PEER]).middle
    measurable = device == "GPUs" and settings["width"] == LARGE
    agree = "agree" if found["difference"] <= CLOSE else "DIFFER"
    shards = settings["nproc"] > 1
    rows = timing_rows(times, (PEER,), 1e3)
    sizes = {OURS: memory[OURS], CAPTURED: memory[OURS], PEER: memory[PEER]}
    return Report(
        name="lamb",
        caption=CAPTION.format(device=device, **settings),
        columns=(*timing_columns("ms", (PEER,)), "memory per rank, MiB"),
        rows=tuple((*row, number(sizes[row[0]] / 2**20)) for row in rows),
        findings=(
            target(f"{CAPTURED} / {PEER}", part, LIMIT, measurable=measurable),
            target("memory / unsharded", memory[OURS] / memory[PEER], MEMORY, measurable=shards),
            f"moments and float32 weights alone, of unsharded: {state[OURS] / state[PEER]:.2f}",
            f"the weights after two steps {agree}: largest difference {found['difference']:.1e} "
            f"of the largest weight",
        ),
        settings=settings,
    )


def measure(backend: str, rounds: int, width: int) -> dict[str, Any]:
    """Return, on each rank, times, bytes of memory, and how much the weights differ."""
    with ring_and_group(backend) as ring:
        ours, captured, theirs = (parameters(ring, width) for _ in range(3))
        kwargs = {**HOW, "is_grad_scaled_by_nranks": False}
        eager = ops.DistributedFusedLamb(ours, ring, **kwargs)
        graphed = ops.DistributedFusedLamb(captured, ring, **kwargs)
        peer = ForeachLamb(theirs, **HOW)
        for params in (ours, captured):
            give(ring, params)
        step = graph.capture(graphed.step)
        work: dict[str, Callable[[], Any]] = {
            OURS: eager.step,
            CAPTURED: step,
            PEER: peer.step,
        }
        for call in work.values():
            for _ in range(2):
                call()
        difference = max(apart(ours, theirs), apart(captured, theirs))
        state = {OURS: nbytes(eager.shards), PEER: nbytes(peer.state)}
        memory = {
            OURS: nbytes([*eager.shards, *with_gradients(ours)]),
            PEER: nbytes([*peer.state, *with_gradients(theirs)]),
        }
        calls = {name: partial(_settled, call, settler(ring)) for name, call in work.items()}
        times = race(calls, rounds=rounds, calls=CALLS)
        step.reset()
        return {"times": times, "memory": memory, "state": state, "difference": difference}


def shapes(width: int) -> list[tuple[int, ...]]:
    """Return the shapes of BERT-large's parameters with another hidden size."""
    norm = [(width,), (width,)]
    layer = [*([(width, width), (width,)] * 4), *norm]
    layer += [(4 * width, width), (4 * width,), (width, 4 * width), (width,), *norm]
    vocabulary = 30522 * width // LARGE
    return [(vocabulary, width), (512, width), (2, width), *norm, *layer * LAYERS, *norm]


def parameters(ring: CommContext, width: int) -> list[torch.nn.Parameter]:
    """Return weights, the same on every rank, with the gradients of this rank."""
    draw = torch.Generator(ring.device).manual_seed(1)
    kwargs: dict[str, Any] = {"device": ring.device, "generator": draw}
    params = [torch.nn.Parameter((torch.randn(s, **kwargs) / 32).bfloat16()) for s in shapes(width)]
    give(ring, params)
    return params


def give(ring: CommContext, params: list[torch.nn.Parameter]) -> None:
    """Set the gradients of this rank."""
    draw = torch.Generator(ring.device).manual_seed(2 + ring.rank)
    for param in params:
        drawn = torch.randn(param.shape, device=ring.device, generator=draw).bfloat16()
        param.grad = drawn if param.grad is None else param.grad.copy_(drawn)


def apart(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> float:
    """Return the largest difference of two models, relative to the largest weight."""
    pairs = zip(ours, theirs, strict=True)
    difference = max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
    return difference / max(float(p.detach().abs().max()) for p in theirs)


def with_gradients(params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return parameters and their gradients."""
    return [*params, *(param.grad for param in params if param.grad is not None)]


def nbytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of the memory that tensors are in, such as flat buffers with padding."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _settled(call: Any, settle: Any) -> None:
    call()
    settle()
