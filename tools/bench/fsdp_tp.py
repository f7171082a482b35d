"""Benchmark `fsdp-tp`: sharded times tensor parallel training from graphs of compiled code."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

import commlib
from commlib import CommContext, graph
from commlib.tools.bench.launch import launch
from commlib.tools.bench.pair import TIMEOUT, backend_for, slowest_seconds
from commlib.tools.bench.report import (
    NEEDS_GPUS,
    Report,
    Row,
    number,
    target,
    timing_columns,
    timing_rows,
)
from commlib.tools.bench.rounds import Samples, interleave, ratio

ROUNDS = 6
OURS, COMPILED, EAGER = "backend=commlib.graph.backend", "torch.compile", "eager"
VERIFIED = f"{OURS}, a replay verified"
PEERS = (COMPILED, EAGER)
LAUNCH, COMPUTE = "launch-bound", "compute-bound"
STEP, MEMORY = "step, ms", "memory, MiB"
UNITS = {STEP: 1e3, MEMORY: 2**-20}  # The units in a second, and in a byte.
LIMITS = {LAUNCH: 0.9, COMPUTE: 1.02}  # Limits, as parts of the time of each peer.
MOST = 1.05  # The limit, as a part of the memory of each peer.
CALLS = {LAUNCH: 20, COMPUTE: 3}  # The steps of a turn.
STEPS = 4  # The steps of a process before its memory is read; the replay after them is verified.
CHECKED = 3  # The losses of these steps are compared.
NEAR = 0.05  # A part of the loss in bfloat16: compiled code rounds elsewhere than eager code.
TOLERANCE = (0.1, 0.1)  # This is for a verified replay, whose memory is measured, not its result.
RATE = 1e-4
ON_GPUS: dict[str, dict[str, int]] = {
    LAUNCH: {
        **{"layers": 2, "hidden": 256, "heads": 4, "inner": 512},
        **{"vocabulary": 512, "rows": 2, "tokens": 64},
    },
    COMPUTE: {
        **{"layers": 2, "hidden": 4096, "heads": 32, "inner": 11008},
        **{"vocabulary": 32000, "rows": 2, "tokens": 2048},
    },
}
ON_CPUS: dict[str, dict[str, int]] = {
    LAUNCH: {"layers": 1, "tokens": 8},
    COMPUTE: {"layers": 1, "tokens": 16},
}
QUICK = "fallback_by_default"  # of Inductor, where it knows it: no C++ is compiled
PROGRAM = Path(commlib.__file__).resolve().parent.parent / "examples" / "fsdp_tp.py"
CAPTION = (
    "The model of examples/fsdp_tp.py on {nproc} ranks on {place}, {shards} shards x {tensor} "
    "parts of each layer, {dtype}, flag on; forward, backward and AdamW. step: on the slowest "
    "rank, every peer in the same processes; ours with verify=False. {sizes}. memory: the fall of "
    "torch.cuda.mem_get_info from before the model until the last of "
    f"{STEPS} steps, {COMPUTE}, on the GPU where it is most, in fresh processes, on GPUs alone; "
    "ours before any replay is verified, and after one more step, whose replay is."
)
Found = Mapping[str, Mapping[str, Samples]]  # size -> figure -> peer -> values


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here."""
    if nproc not in (2, 4, 8):
        return f"{nproc} ranks: expected 2, 4 or 8; pass --nproc 2"
    if not PROGRAM.exists():
        return f"{PROGRAM} does not exist: an installed commlib has no examples; use a checkout"
    return None


def run(nproc: int, rounds: int) -> Report:
    """Measure on ``nproc`` GPUs, one per rank, or tiny models on CPUs where there are fewer."""
    backend = backend_for(nproc)
    results = launch("fsdp_tp", nproc, backend=backend, rounds=rounds)
    if backend == "nccl":
        memory = results[COMPUTE][MEMORY] = {}
        for way in WAYS:
            before, after = launch("fsdp_tp", nproc, backend=backend, way=way)
            memory[way] = [before]
            if way == OURS:
                memory[VERIFIED] = [after]
    return report(results, {"nproc": nproc, "rounds": rounds}, backend)


def report(found: Found, settings: dict[str, int], backend: str) -> Report:
    """Turn the samples of each size into a table and findings."""
    on_gpus, tensor = backend == "nccl", parts(settings["nproc"])
    sizes = (
        f"{name}: " + ", ".join(f"{size} {label}" for label, size in values.items())
        for name, values in (ON_GPUS if on_gpus else ON_CPUS).items()
    )
    return Report(
        name="fsdp-tp",
        caption=CAPTION.format(
            place="GPUs" if on_gpus else "CPUs",
            dtype="bfloat16" if on_gpus else "float32",
            shards=settings["nproc"] // tensor,
            tensor=tensor,
            sizes="; ".join(sizes),
            **settings,
        ),
        columns=timing_columns("value", PEERS, "size", "figure"),
        rows=tuple(_rows(found)),
        findings=(*_times(found, on_gpus), *_memory(found)),
        settings=settings,
    )


@cache
def program() -> Any:
    """Load the example, which belongs to no package."""
    spec = spec_from_file_location(PROGRAM.stem, PROGRAM)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parts(ranks: int) -> int:
    """Return how many ranks share a layer."""
    return 2 if ranks > 2 else 1


def _rows(found: Found) -> Iterator[Row]:
    for size, figures in found.items():
        for figure, samples in figures.items():
            yield from timing_rows(samples, PEERS, UNITS[figure], size, figure)


def _times(found: Found, on_gpus: bool) -> Iterator[str]:
    for size, limit in LIMITS.items():
        samples = found[size][STEP]
        for peer in PEERS:
            part = ratio(samples[OURS], samples[peer]).middle
            yield target(f"{size}, step, {OURS} / {peer}", part, limit, measurable=on_gpus)


def _memory(found: Found) -> Iterator[str]:
    samples = found[COMPUTE].get(MEMORY)
    for peer in PEERS:
        label = f"{COMPUTE}, memory, {OURS} / {peer}"
        if samples is None:
            yield f"{NEEDS_GPUS}: {label}"
        else:
            yield target(label, ratio(samples[OURS], samples[peer]).middle, MOST)
            part = ratio(samples[VERIFIED], samples[peer]).middle
            yield f"{COMPUTE}, memory, {VERIFIED} / {peer}: {number(part)}"


# -- on each rank ---------------------------------------------------------------------------------


def measure(backend: str, rounds: int = ROUNDS, way: str | None = None) -> Any:
    """Return, on each rank, the samples of both sizes; with ``way``, the bytes that it takes.

    These are read before and after the first verified replay.
    """
    ring = commlib.init(backend, timeout=TIMEOUT)  # makes this rank's GPU the current one
    program().make_rings(parts(ring.size))
    with _quick(ring):
        results: Any
        if way is None:
            results = {size: {STEP: _steps(ring, size, rounds)} for size in LIMITS}
        else:
            results = _taken(ring, way)
    commlib.shutdown()
    return results


def _quick(ring: CommContext) -> AbstractContextManager[Any]:
    """Let Inductor keep torch's operators on CPUs, whose generated code is not measured."""
    if ring.device.type == "cuda" or not hasattr(torch._inductor.config, QUICK):
        return nullcontext()
    patch: AbstractContextManager[Any] = torch._inductor.config.patch({QUICK: True})
    return patch


def _steps(ring: CommContext, size: str, rounds: int) -> Samples:
    trainings = {way: Training(ring, size, way, verify=0) for way in WAYS}
    losses = {
        way: [float(training.step()) for _ in range(CHECKED)] for way, training in trainings.items()
    }
    check(size, losses)
    calls = CALLS[size] if ring.device.type == "cuda" else 1  # CPUs are not measured
    meters = {
        way: partial(slowest_seconds, ring, training.step, calls)
        for way, training in trainings.items()
    }
    samples = interleave(meters, rounds=rounds)
    torch.compiler.reset()  # releases the graphs; else the next size is compiled for any shape
    return samples


def check(size: str, losses: Mapping[str, Sequence[float]]) -> None:
    """Raise ``AssertionError`` where a way leads to other losses than the eager one."""
    for way, actual in losses.items():
        for loss, expected in zip(actual, losses[EAGER], strict=True):
            if not abs(loss - expected) <= NEAR * abs(expected):
                raise AssertionError(f"{size}, {way}: losses {actual}, expected {losses[EAGER]}")


def _taken(ring: CommContext, way: str) -> tuple[int, int]:
    """Return the bytes that training takes on the GPU where it is most; 0 on CPUs."""
    before = _free(ring)
    training = Training(ring, COMPUTE, way, verify=STEPS)
    taken = []
    for steps in (STEPS, 1):
        for _ in range(steps):
            training.step()
        taken.append(max(row[0] for row in ring.exchange([before - _free(ring)])))
    del training
    torch.compiler.reset()  # before the communicators that the graphs use are closed
    gc.collect()
    return taken[0], taken[1]


def _free(ring: CommContext) -> int:
    """Return the free bytes of this rank's GPU once every rank is here; 0 on a CPU."""
    if ring.device.type == "cpu":
        return 0
    torch.cuda.synchronize(ring.device)
    ring.exchange([])
    return torch.cuda.mem_get_info(ring.device)[0]


class Training:
    """A model of the example with its optimizer and a batch, in one of the ways."""

    def __init__(self, ring: CommContext, size: str, way: str, *, verify: int) -> None:
        example, on_gpu = program(), ring.device.type == "cuda"
        sizes = example.Sizes(**(ON_GPUS if on_gpu else ON_CPUS)[size])
        self.model = example.Llama(sizes).to(torch.bfloat16 if on_gpu else torch.float32)
        self.forward = WAYS[way](self.model, verify)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE, fused=True)
        if on_gpu:
            torch.cuda.empty_cache()  # of whole float32 weights
        draw = torch.Generator().manual_seed(2 + commlib.comm(example.DATA).rank)
        self.batch = example.make_batch(sizes, draw)

    def step(self) -> torch.Tensor:
        """Make a step and return its loss."""
        self.optimizer.zero_grad()
        loss = self.forward(*self.batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


Forward = Callable[..., torch.Tensor]


def _from_graphs(model: torch.nn.Module, verify: int) -> Forward:
    # Attention adds its gradients in any order: bits of a verified replay differ.
    options: dict[str, Any] = {"on_fail": "raise", "verify": verify, "tolerance": TOLERANCE}
    forward: Forward = torch.compile(
        model, fullgraph=True, dynamic=False, backend=graph.backend, options=options
    )
    return forward


def _compiled(model: torch.nn.Module, verify: int) -> Forward:
    forward: Forward = torch.compile(model, fullgraph=True, dynamic=False)
    return forward


def _eager(model: torch.nn.Module, verify: int) -> Forward:
    return model


WAYS: Mapping[str, Callable[[torch.nn.Module, int], Forward]] = {
    OURS: _from_graphs,
    COMPILED: _compiled,
    EAGER: _eager,
}
