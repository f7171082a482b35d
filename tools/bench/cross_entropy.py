"""Benchmark `cross-entropy`: forward and backward over sharded classes against a composition."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commlib import ops
from commlib.tools.bench.launch import launch
from commlib.tools.bench.pair import backend_for, ring_and_group, settler
from commlib.tools.bench.report import Report, number, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, race, ratio, spread

ROUNDS = 20
OURS, PEER = "ops.softmax_with_cross_entropy", "composition"
CALLS, PEAKS = 3, 3  # calls a round, and how often the memory of each is taken
OF_TIME, OF_MEMORY = 0.70, 0.60
OPTIONS = ("rows", "classes", "dtype")
ON_GPUS, ON_CPUS = (8192, 152064, "bfloat16"), (256, 8192, "float32")
MEBIBYTE = 2**20
CAPTION = (
    "Time of one forward and backward on rank 0, flag on, synchronised after every call; peak "
    "memory in addition to the logits, by torch.cuda.max_memory_allocated. {rows} rows x "
    "{classes} classes "
    "over {nproc} ranks, {dtype}, on {place}. Peer: Megatron-style torch operators and three "
    "all_reduces of torch.distributed over the same ranks in the same processes: the maximum, "
    "subtracted in place; the gathered target; exp in place and its sum; float32 throughout, the "
    f"softmax kept and the gradient written into it. Targets for {OURS} on 8 GPUs: at most "
    f"{OF_TIME:.2f} of its time and {OF_MEMORY:.2f} of its memory."
)


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here."""
    return None if nproc > 0 else f"{nproc} ranks: expected 1 or more; pass --nproc 2"


def run(
    nproc: int,
    rounds: int,
    rows: int | None = None,
    classes: int | None = None,
    dtype: str | None = None,
) -> Report:
    """Measure on ``nproc`` GPUs, one a rank, or on CPUs where there are fewer; other sizes there.

    ``classes`` are those of all ranks together; what does not divide is left away.
    """
    backend = backend_for(nproc)
    usual = ON_GPUS if backend == "nccl" else ON_CPUS
    settings: dict[str, Any] = {"rows": rows or usual[0], "classes": classes or usual[1]}
    settings |= {"dtype": dtype or usual[2]}
    results = launch("cross_entropy", nproc, backend=backend, rounds=rounds, **settings)
    return report(results, {"nproc": nproc, "rounds": rounds, **settings})


def report(found: dict[str, Any], settings: dict[str, Any]) -> Report:
    """Turn times and peaks into a table and findings."""
    times, peaks = found["times"], found["peaks"]
    time = ratio(times[OURS], times[PEER]).middle
    findings = [target(f"time, {OURS} / {PEER}", time, OF_TIME, measurable=bool(peaks))]
    if peaks:
        part = ratio(peaks[OURS], peaks[PEER]).middle
        findings.append(target(f"peak memory, {OURS} / {PEER}", part, OF_MEMORY))
    findings.append(
        f"loss and gradient of both differ by at most {found['apart']:.2g} of the peer's"
    )
    rows = timing_rows(times, (PEER,), 1e3)
    return Report(
        name="cross-entropy",
        caption=CAPTION.format(place="GPUs" if peaks else "CPUs", **settings),
        columns=(*timing_columns("ms", (PEER,)), "peak memory, MiB", f"ratio to {PEER}"),
        rows=tuple((*row, *_memory(row[0], peaks)) for row in rows),
        findings=tuple(findings),
        settings=settings,
    )


def _memory(name: str, peaks: Samples) -> tuple[str, str]:
    if not peaks:
        return "not available", "not available"
    middle = spread(peaks[name]).middle
    return number(middle / MEBIBYTE), number(ratio(peaks[name], peaks[PEER]).middle)


def measure(backend: str, rounds: int, rows: int, classes: int, dtype: str) -> dict[str, Any]:
    """Return, on each rank, times and peaks of both, and how far their results are apart."""
    with ring_and_group(backend) as ring:
        width = classes // ring.size
        torch.manual_seed(ring.rank)
        x = torch.randn(rows, width, device=ring.device).to(getattr(torch, dtype))
        torch.manual_seed(0)  # every rank has the labels of the whole batch
        label = torch.randint(width * ring.size, (rows,)).to(ring.device)
        losses: dict[str, Callable[..., torch.Tensor]] = {
            OURS: ops.softmax_with_cross_entropy,
            PEER: partial(_composed, start=ring.rank * width),
        }
        on_gpu = ring.device.type == "cuda"
        settle = settler(ring)
        calls = {name: _Step(loss, x, label, settle) for name, loss in losses.items()}
        apart = _apart(*(call() for call in calls.values()))
        times = race(calls, rounds=rounds, calls=CALLS)
        measured = calls if on_gpu else {}  # torch does not count the memory of a CPU
        peaks = {name: [_peak(call) for _ in range(PEAKS)] for name, call in measured.items()}
        return {"times": times, "peaks": peaks, "apart": apart}


class _Step:
    """One forward and backward of a loss; returns the loss and the gradient."""

    def __init__(
        self,
        loss: Callable[..., torch.Tensor],
        x: torch.Tensor,
        label: torch.Tensor,
        settle: Callable[[], object],
    ) -> None:
        # A copy each, for the composition writes into float32 logits.
        self.loss, self.x, self.label, self.settle = loss, x.clone(), label, settle
        self.x.requires_grad_()
        self.ones: torch.Tensor | None = None

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.loss(self.x, self.label)
        if self.ones is None:
            self.ones = torch.ones_like(loss)
        (grad,) = torch.autograd.grad(loss, self.x, self.ones)
        self.settle()
        return loss, grad


def _apart(ours: tuple[torch.Tensor, ...], peers: tuple[torch.Tensor, ...]) -> float:
    """Return the largest difference in relation to the largest value of the peer."""
    pairs = zip(ours, peers, strict=True)
    return max(_relative(a.detach().flatten(), b.detach().flatten()) for a, b in pairs)


def _relative(ours: torch.Tensor, peers: torch.Tensor) -> float:
    largest = torch.linalg.vector_norm(peers, torch.inf, dtype=torch.float32)
    return float(torch.linalg.vector_norm(ours - peers, torch.inf, dtype=torch.float32) / largest)


def _peak(call: Callable[[], object]) -> float:
    """Return the most memory that one call takes in addition to the earlier memory."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return float(torch.cuda.max_memory_allocated() - before)


def _composed(x: torch.Tensor, label: torch.Tensor, *, start: int) -> torch.Tensor:
    loss: torch.Tensor = _Composition.apply(x, label, start)  # type: ignore[no-untyped-call]
    return loss


class _Composition(torch.autograd.Function):
    """The usual way: torch operators and three all_reduces, in place where that is possible."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, label: torch.Tensor, start: int) -> torch.Tensor:
        z = logits.float()
        top = z.amax(1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        z -= top.unsqueeze(1)
        elsewhere = (label < start) | (label >= start + z.shape[1])
        column = (label - start).masked_fill_(elsewhere, 0)
        rows = torch.arange(len(z), device=z.device)
        picked = z[rows, column].masked_fill_(elsewhere, 0)
        dist.all_reduce(picked)
        torch.exp(z, out=z)
        total = z.sum(1)
        dist.all_reduce(total)
        ctx.save_for_backward(z.div_(total.unsqueeze(1)), elsewhere, column, rows)
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        z, elsewhere, column, rows = ctx.saved_tensors
        z[rows, column] -= 1.0 - elsewhere.float()
        return z.mul_(grads[0].unsqueeze(1)), None, None
