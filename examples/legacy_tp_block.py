"""Train a tensor-parallel transformer block that knows only the legacy collective call sites.

The program is what a team runs today: each collective is a statement of the legacy library, and
commlib.init() replaces init_parallel_env(). FLAGS_dynamic_static_unified_comm chooses
the engine below, --compile puts torch.compile above; no line of the program depends on either.

    torchrun --standalone --nproc-per-node 2 examples/legacy_tp_block.py --json off.json
    export FLAGS_dynamic_static_unified_comm=1
    torchrun --standalone --nproc-per-node 2 examples/legacy_tp_block.py --json on.json --compile

The number of ranks must divide the 8 attention heads and be at least 2. In the JSON "operators" are
the same bit by bit in every mode, and "training" on both engines; torch.compile may change its last
bits. All floating-point numbers of both are hexadecimal floats, so that nothing is rounded. The
other entries (times, memory, engine, communicators) belong to one run.
"""

import argparse
import faulthandler
import hashlib
import json
import math
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import commlib
from commlib.compat import paddle

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 64, 64, 8, 16, 4
LEARNING_RATE, LARGEST_NORM = 0.5, 1.0

# name -> (shape of the whole weight, how it is sharded: by "rows", by "columns", or not at all)
WEIGHTS: dict[str, tuple[tuple[int, ...], str]] = {
    "embedding": ((VOCABULARY, WIDTH), "rows"),
    "position": ((LENGTH, WIDTH), "whole"),
    "norm_attention": ((WIDTH,), "whole"),
    "qkv": ((3 * WIDTH, WIDTH), "rows"),  # one head after the other, each with its q, k and v
    "projection": ((WIDTH, WIDTH), "columns"),
    "norm_mlp": ((WIDTH,), "whole"),
    "up": ((4 * WIDTH, WIDTH), "rows"),
    "down": ((WIDTH, 4 * WIDTH), "columns"),
    "norm_output": ((WIDTH,), "whole"),
}


def shard(whole: Tensor, sharding: str, rank: int, size: int) -> Tensor:
    """Return this rank's part of a weight."""
    if sharding == "rows":
        return whole.chunk(size)[rank].clone()
    if sharding == "columns":
        return paddle.c_split(whole, rank=rank, nranks=size)
    return whole.clone()


def drawn(rank: int) -> dict[str, Tensor]:
    """Draw every whole weight; each rank draws others."""
    generator = torch.Generator().manual_seed(1000 + rank)
    full_weights = {}
    for name, (shape, _) in WEIGHTS.items():
        weight = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
        full_weights[name] = torch.ones(shape) if name.startswith("norm") else weight
    return full_weights


def weights(rank: int, size: int, device: torch.device) -> dict[str, Tensor]:
    """Take the weights that rank 0 drew, and keep this rank's part."""
    parts = {}
    for name, weight in drawn(rank).items():
        full_weight = paddle.c_broadcast(weight.to(device), root=0, use_calc_stream=True)
        parts[name] = shard(full_weight, WEIGHTS[name][1], rank, size).requires_grad_()
    return parts


def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids and the ids that follow them, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator).to(device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """LayerNorm over the model's width; each rank computes the same."""
    return F.layer_norm(x, (WIDTH,), weight)


def attention(w: Mapping[str, Tensor], x: Tensor, size: int) -> Tensor:
    """Causal self-attention: each rank computes its own heads."""
    heads, head_width = HEADS // size, WIDTH // HEADS
    mixed = F.linear(paddle.c_identity(x), w["qkv"]).view(BATCH, LENGTH, heads, 3, head_width)
    q, k, v = mixed.permute(3, 0, 2, 1, 4).unbind(0)
    scores = q @ k.transpose(-1, -2) / math.sqrt(head_width)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
    seen = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ v
    joined = seen.transpose(1, 2).reshape(BATCH, LENGTH, heads * head_width)
    return paddle.mp_allreduce_sum(F.linear(joined, w["projection"]), use_calc_stream=True)


def mlp(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Two layers, the first split by columns and the second by rows of the matrix product."""
    hidden = F.gelu(F.linear(paddle.c_identity(x), w["up"]))
    return paddle.mp_allreduce_sum(F.linear(hidden, w["down"]), use_calc_stream=True)


def loss_of(w: Mapping[str, Tensor], ids: Tensor, after: Tensor, rank: int, size: int) -> Tensor:
    """Return the cross-entropy of the next token; the vocabulary is split over the ranks."""
    first = rank * (VOCABULARY // size)
    embedded = paddle.c_embedding(w["embedding"], ids, start_index=first, vocab_size=VOCABULARY)
    x = paddle.mp_allreduce_sum(embedded, use_calc_stream=True) + w["position"]
    x = x + attention(w, norm(x, w["norm_attention"]), size)
    x = x + mlp(w, norm(x, w["norm_mlp"]))
    logits = F.linear(paddle.c_identity(norm(x, w["norm_output"])), w["embedding"])
    full_logits = paddle.c_concat(logits, rank=rank, nranks=size)
    return F.cross_entropy(full_logits.flatten(0, 1), after.flatten())


def squares(w: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the squared gradients of all ranks, shared weights counted once."""
    parts = {name: (g * g).sum() for name, g in grads.items()}
    shared = torch.stack([parts[n] for n in w if WEIGHTS[n][1] == "whole"]).sum()
    sharded = torch.stack([parts[n] for n in w if WEIGHTS[n][1] != "whole"]).sum()
    return paddle.c_allreduce_sum(sharded, use_calc_stream=True) + shared


def step(loss_function: Callable[..., Tensor], w: dict[str, Tensor], *inputs: Any) -> list[Tensor]:
    """Take one clipped SGD step; return loss, norm and largest entry of the gradient."""
    loss = loss_function(w, *inputs)
    grads = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
    with torch.no_grad():
        length = squares(w, grads).sqrt()
        top = torch.stack([g.abs().max() for g in grads.values()]).max()
        top = paddle.c_allreduce_max(top, use_calc_stream=True)
        scale = LEARNING_RATE * torch.clamp(LARGEST_NORM / length, max=1.0)
        for name, weight in w.items():
            weight.sub_(grads[name] * scale)
    return [loss.detach(), length, top]


def exchange(x: Tensor, rank: int, size: int) -> Tensor:
    """Send to the next rank and receive from the one before; even ranks send first."""
    after, before = (rank + 1) % size, (rank - 1) % size
    if rank % 2 == 0:
        paddle.send_v2(x, peer=after, use_calc_stream=True)
    got = paddle.recv_v2(list(x.shape), x.dtype, peer=before, use_calc_stream=True)
    if rank % 2 == 1:
        paddle.send_v2(x, peer=after, use_calc_stream=True)
    return got


def collectives(x: Tensor, rank: int, size: int) -> dict[str, Tensor]:
    """Call every legacy collective once, on the communication stream unless said otherwise."""
    paddle.c_wait_compute(x)
    results = {
        "c_allgather": paddle.c_allgather(x, nranks=size),
        "c_allreduce_sum": paddle.c_allreduce_sum(x),
        "c_allreduce_max": paddle.c_allreduce_max(x),
        "c_allreduce_min": paddle.c_allreduce_min(x),
        "c_allreduce_prod": paddle.c_allreduce_prod(x),
        "mp_allreduce_sum": paddle.mp_allreduce_sum(x),
        "c_broadcast": paddle.c_broadcast(x, root=size - 1),
        "c_reduce_sum": paddle.c_reduce_sum(x, root_id=0),
        "c_reducescatter": paddle.c_reducescatter(x, nranks=size),
        "c_scatter": paddle.c_scatter(x, root=0, nranks=size),
        "alltoall": paddle.alltoall(x),
        "c_concat": paddle.c_concat(x, rank=rank, nranks=size, use_calc_stream=False),
    }
    paddle.c_wait_comm(x)
    ids = torch.arange(size * len(x), device=x.device)
    return results | {
        "send_v2, recv_v2": exchange(x, rank, size),
        "c_identity": paddle.c_identity(x),
        "c_split": paddle.c_split(results["c_concat"], rank=rank, nranks=size),
        "c_embedding": paddle.c_embedding(x, ids, start_index=rank * len(x)),
    }


def meet(rank: int, device: torch.device) -> Tensor:
    """Return 1 if no rank left a barrier before the last one came; ranks share one host's clock."""
    time.sleep(0.05 * rank)
    came = torch.tensor([time.monotonic()], dtype=torch.float64, device=device)
    paddle.barrier()
    left = torch.tensor([time.monotonic()], dtype=torch.float64, device=device)
    last = paddle.c_allreduce_max(came, use_calc_stream=True)
    first = paddle.c_allreduce_min(left, use_calc_stream=True)
    return (first >= last).float()


def known_input(rank: int, size: int, device: torch.device) -> Tensor:
    """Return signed powers of two: their sums and products are exact in any order."""
    generator = torch.Generator().manual_seed(100 + rank)
    shape = (2 * size, 4)
    powers = torch.randint(-3, 4, shape, generator=generator)
    signs = torch.randint(2, shape, generator=generator) * 2 - 1
    return (signs * torch.exp2(powers)).to(device)


def memory_in_use(device: torch.device) -> int:
    """Return the bytes in use on the GPU, or this process's resident bytes."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: the highest so far


def train(
    loss_function: Callable[..., Tensor], steps: int, rank: int, size: int, device: torch.device
) -> tuple[dict[str, list[str]], list[float]]:
    """Return loss, gradient norm and largest gradient of each step, and each step's seconds."""
    w = weights(rank, size, device)
    inputs = batch(device)
    series: dict[str, list[str]] = {"loss": [], "gradient norm": [], "largest gradient": []}
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        values = step(loss_function, w, *inputs, rank, size)
        for column, value in zip(series.values(), values, strict=True):
            column.append(float(value).hex())  # float() waits for the device
        seconds.append(time.perf_counter() - began)
    return series, seconds


def record(result: Tensor, size: int) -> dict[str, Any]:
    """Return one operator's results of all ranks: shape, dtype, digest, every value."""
    gathered = paddle.c_allgather(result.flatten(), nranks=size, use_calc_stream=True).cpu()
    return {
        "shape": [size, *result.shape],
        "dtype": str(result.dtype).removeprefix("torch."),
        "sha256": hashlib.sha256(gathered.numpy().tobytes()).hexdigest(),
        "values": [value.hex() for value in gathered.tolist()],
    }


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    compiler = {"nargs": "?", "const": "inductor", "metavar": "COMPILER"}
    parser.add_argument("--compile", **compiler, help="put torch.compile over the program")
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="default: nccl on GPUs")
    parser.add_argument("--steps", type=int, default=6, help="training steps (default: 6)")
    parser.add_argument("--deadline", type=float, default=600, help="seconds a rank may take")
    parser.add_argument("--json", type=Path, help="where rank 0 writes the results")
    chosen = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2 or HEADS % ranks:
        parser.exit(
            2, f"{ranks} ranks for {HEADS} heads: type torchrun --nproc-per-node 2, 4 or 8\n"
        )
    if chosen.steps < 1:
        parser.exit(2, f"--steps {chosen.steps}: expected 1 or more\n")
    return chosen


def start(backend: str | None) -> tuple[commlib.CommContext, int]:
    """Open ring 0; return it with the memory that was in use before."""
    device, ranks = torch.device("cpu"), os.environ["WORLD_SIZE"]
    each_has_one = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if backend != "gloo" and torch.cuda.device_count() >= each_has_one:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # a CPU rank has one thread: one order
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        torch.zeros(1, device=device)  # the CUDA context is not part of a communicator's memory
    before = memory_in_use(device)
    return commlib.init(backend, device=device), before


def main() -> None:
    """Exercise the collectives, train, and let rank 0 report."""
    chosen = options()
    faulthandler.dump_traceback_later(chosen.deadline, exit=True)
    context, before = start(chosen.backend)
    rank, size, device = context.rank, context.size, context.device
    paddle.barrier()
    taken = memory_in_use(device) - before

    def built(function: Callable[..., Any]) -> Callable[..., Any]:
        if chosen.compile is None:
            return function
        return torch.compile(function, fullgraph=True, backend=chosen.compile)

    x = known_input(rank, size, device)
    results = {"input": x, **built(collectives)(x, rank, size), "barrier": meet(rank, device)}
    training, seconds = train(built(loss_of), chosen.steps, rank, size, device)
    report = {
        "ranks": size,
        "engine": context.engine,
        "device": device.type,
        "compiled": chosen.compile is not None,
        "operators": {name: record(result, size) for name, result in results.items()},
        "training": training,
        "first_step_s": seconds[0],
        "step_s": statistics.median(seconds[1:] or seconds),
        "memory_bytes": taken,
        "communicators": commlib.CommContextManager.instance().report(),
    }
    if rank == 0:
        text = json.dumps(report, indent=1)
        chosen.json.write_text(text) if chosen.json else print(text)
    commlib.shutdown()


if __name__ == "__main__":
    main()
