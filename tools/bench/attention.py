"""Benchmark `attention`: a tensor-parallel attention block against modules and collectives."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _functional_collectives as functional

from commlib import ops
from commlib.tools.bench.launch import launch
from commlib.tools.bench.pair import backend_for, ring_and_group, settler
from commlib.tools.bench.report import Report, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import race, ratio

ROUNDS = 20
OURS, OURS_COMPILED = "ops.fused_attention", "ops.fused_attention, compiled"
PEER, PEER_COMPILED = "torch modules + torch.distributed", "the same, torch.compile"
OVERLAPPED, SEQUENTIAL = "gradients of the QKV layer", "the same, all_reduce before the weight's"
PAIRS = (  # with the target
    (OURS, PEER, 0.90),
    (OURS, PEER_COMPILED, 1.00),
    (OURS_COMPILED, PEER_COMPILED, 1.00),
    (OVERLAPPED, SEQUENTIAL, 1.00),
)
CALLS = 3  # calls a round
IN_A_ROW = 4  # parts of a backward: one alone would show the host's time before its first kernel
OPTIONS = ("rows", "width")
ON_GPUS, ON_CPUS = (4096, 8192), (32, 64)  # tokens, width
HEAD_DIM, SMALL_HEAD_DIM = 128, 8
CAPTION = (
    "Time of one forward and backward on rank 0, flag on, synchronised after every call. A causal "
    "attention block with its layer norm first, {rows} tokens x {width}, {heads} heads over "
    "{nproc} ranks, {dtype}, without dropout, on {place}. Peers, in the same processes: the same "
    "block in torch modules, with Megatron's two functions around its linear layers (copy and "
    "all_reduce, all_reduce and copy) over torch.distributed; and both blocks by torch.compile "
    "({compiler}), the peer's with functional collectives. Both do one all_reduce of "
    "tokens x width in each direction. The last two rows are a part of the backward: the gradients "
    "by input and weight of the first layer, with the all_reduce in flight while the weight's is "
    f"computed, as in the operator, and before it; {IN_A_ROW} of them in a row."
)


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here."""
    return None if nproc > 0 else f"{nproc} ranks: expected 1 or more; pass --nproc 2"


def run(nproc: int, rounds: int, rows: int | None = None, width: int | None = None) -> Report:
    """Measure on ``nproc`` GPUs, one a rank, or on CPUs where there are fewer; other sizes there.

    ``rows``: tokens. A ``width`` that heads do not divide over the ranks is rounded down.
    """
    backend = backend_for(nproc)
    usual = ON_GPUS if backend == "nccl" else ON_CPUS
    heads, head_dim = _heads(width or usual[1], nproc)
    settings: dict[str, Any] = {"rows": rows or usual[0], "width": heads * head_dim}
    results = launch("attention", nproc, backend=backend, rounds=rounds, **settings)
    return report(results, {"nproc": nproc, "rounds": rounds, **settings}, backend)


def report(found: dict[str, Any], settings: dict[str, int], backend: str) -> Report:
    """Turn times into a table and findings."""
    times, on_gpus = found["times"], backend == "nccl"
    heads, _ = _heads(settings["width"], settings["nproc"])
    names = {"place": "GPUs", "dtype": "bfloat16"} if on_gpus else _CPU
    return Report(
        name="attention",
        caption=CAPTION.format(heads=heads, compiler=_compiler(backend), **names, **settings),
        columns=timing_columns("ms", (PEER, PEER_COMPILED)),
        rows=tuple(timing_rows(times, (PEER, PEER_COMPILED), 1e3)),
        findings=(
            *(
                target(
                    f"{ours} / {peer}",
                    ratio(times[ours], times[peer]).middle,
                    limit,
                    measurable=on_gpus,
                )
                for ours, peer, limit in PAIRS
            ),
            f"results and gradients differ by at most {found['apart']:.2g} of the peer's",
        ),
        settings=settings,
    )


_CPU = {"place": "CPUs", "dtype": "float32"}


def _compiler(backend: str) -> str:
    """Return the compiler's backend: the generated code of CPUs is not what is measured."""
    return "inductor" if backend == "nccl" else "aot_eager"


def _heads(width: int, size: int) -> tuple[int, int]:
    """Return the number of heads, which ``size`` divides, and their width."""
    head_dim = HEAD_DIM if width >= HEAD_DIM * size else SMALL_HEAD_DIM
    return max(1, width // head_dim // size) * size, head_dim


def measure(backend: str, rounds: int, rows: int, width: int) -> dict[str, Any]:
    """Return, on each rank, the times of all blocks, and how far their results are apart."""
    with ring_and_group(backend) as ring:
        heads, head_dim = _heads(width, ring.size)
        dtype = torch.bfloat16 if backend == "nccl" else torch.float32
        block = _Block(width, heads // ring.size, head_dim, ring.size).to(ring.device, dtype)
        torch.manual_seed(0)
        x = torch.randn(1, rows, width).to(ring.device, dtype).requires_grad_()
        compiled = partial(torch.compile, fullgraph=True, backend=_compiler(backend))
        forwards: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            OURS: block.ours,
            OURS_COMPILED: compiled(block.ours),
            PEER: block,
            PEER_COMPILED: compiled(block),
        }
        steps = {n: _Step(f, x, block, settler(ring)) for n, f in forwards.items()}
        wanted = steps[PEER]()
        apart = max(_apart(step(), wanted) for step in steps.values())
        parts = _parts(ring, x.detach().squeeze(0), block.qkv.weight.detach())
        return {"times": race({**steps, **parts}, rounds=rounds, calls=CALLS), "apart": apart}


def _parts(
    ring: Any, x: torch.Tensor, weight: torch.Tensor
) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Return the gradients of a column-parallel layer, with and without the overlap."""
    settle = settler(ring)
    grad = torch.ones(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)

    def overlapped() -> list[torch.Tensor]:
        # use_calc_stream, and the gradients by x and by the weight
        call = torch.ops.commlib.column_linear_grad
        for _ in range(IN_A_ROW):
            grads = call(grad, x, weight, ring.ring_id, ring.size, True, True, True, False)
        settle()
        return list(grads)

    def sequential() -> list[torch.Tensor]:
        for _ in range(IN_A_ROW):
            partial_sum = grad @ weight
            total = ring.all_reduce(torch.empty_like(partial_sum), partial_sum)
            grads = [total, grad.t() @ x]
        settle()
        return grads

    return {OVERLAPPED: overlapped, SEQUENTIAL: sequential}


class _Step:
    """One forward and backward; returns the result and all gradients."""

    def __init__(
        self,
        forward: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        block: torch.nn.Module,
        settle: Callable[[], object],
    ) -> None:
        self.forward, self.settle, self.x = forward, settle, x
        self.leaves = [x, *block.parameters()]
        self.grad = torch.ones_like(x)

    def __call__(self) -> list[torch.Tensor]:
        y = self.forward(self.x)
        grads = torch.autograd.grad(y, self.leaves, self.grad)
        self.settle()
        return [y.detach(), *grads]


def _apart(ours: list[torch.Tensor], peers: list[torch.Tensor]) -> float:
    """Return the largest difference in relation to the largest value of the peer."""
    pairs = zip(ours, peers, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


class _Block(torch.nn.Module):
    """The usual way: modules, and two functions of Megatron-LM around the linear layers."""

    def __init__(self, width: int, heads: int, head_dim: int, size: int) -> None:
        """Draw parameters: the layer norm and the last bias are the same on every rank."""
        super().__init__()
        self.heads, self.head_dim, self.size = heads, head_dim, size
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * heads * head_dim)
        self.projection = torch.nn.Linear(heads * head_dim, width, bias=False)
        self.bias = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block of the peer."""
        hidden: torch.Tensor = _Copy.apply(self.norm(x))  # type: ignore[no-untyped-call]
        qkv = self.qkv(hidden).view(*x.shape[:2], 3, self.heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        partial_sum = self.projection(context.transpose(1, 2).flatten(2))
        total: torch.Tensor = _Sum.apply(partial_sum)  # type: ignore[no-untyped-call]
        return x + (total + self.bias)

    def ours(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same block by one operator, with the same parameters."""
        shape = 3, self.heads, self.head_dim
        return ops.fused_attention(
            x,
            self.qkv.weight.view(*shape, x.shape[2]),
            self.projection.weight.t(),
            pre_layer_norm=True,
            ln_weight=self.norm.weight,
            ln_bias=self.norm.bias,
            ln_eps=self.norm.eps,
            qkv_bias=self.qkv.bias.view(shape),
            linear_bias=self.bias,
            is_causal=True,
        )


class _Copy(torch.autograd.Function):
    """A copy whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _summed(grads[0])


class _Sum(torch.autograd.Function):
    """A sum over the ranks whose gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def _summed(x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        group: Any = dist.group.WORLD
        reduced: torch.Tensor = functional.wait_tensor(functional.all_reduce(x, "sum", group))
        return reduced
    total = x.contiguous()
    dist.all_reduce(total)
    return total
