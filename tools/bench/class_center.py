"""Benchmark `class-center`: a sample of class centres against a sort of all classes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commlib import CommContext, ops
from commlib.tools.bench.launch import launch
from commlib.tools.bench.pair import backend_for, ring_and_group, settler
from commlib.tools.bench.report import Report, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import Samples, race, ratio

ROUNDS = 20
OURS, PADDED = "ops.class_center_sample", "ops.class_center_sample, padded"
LEGACY, SORT = "legacy algorithm", "torch.sort alone"
CALLS, SHARE = 5, 10  # calls a round; one of so many classes is sampled
LIMIT = 0.50
OPTIONS = ("rows", "classes")
ON_GPUS, ON_CPUS = (8192, 1_000_000), (512, 50_000)  # labels, classes of a rank
CAPTION = (
    "Time of one call on rank 0, flag on, synchronised after every call. {rows} int64 labels, "
    f"{{classes}} classes over {{nproc}} ranks, one of {SHARE} sampled, on {{device}}. Peers, in "
    "the same processes: the legacy algorithm in torch operators, which gives every class a random "
    "64-bit key, the classes of the batch a negative one, sorts all of them (stable), and sums the "
    "class counts by torch.distributed; and that sort alone, of keys that are there already. "
    f"Target for {OURS} with 1 M classes a rank: at most {LIMIT:.2f} of the sort of all classes, "
    "read as either peer."
)


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here."""
    return None if nproc > 0 else f"{nproc} ranks: expected 1 or more; pass --nproc 2"


def run(nproc: int, rounds: int, rows: int | None = None, classes: int | None = None) -> Report:
    """Measure on ``nproc`` GPUs, one a rank, or on CPUs where there are fewer; other sizes there.

    ``rows``: labels; ``classes``: of all ranks, what does not divide is left away.
    """
    backend = backend_for(nproc)
    usual = ON_GPUS if backend == "nccl" else ON_CPUS
    settings: dict[str, Any] = {"rows": rows or usual[0], "classes": classes or usual[1] * nproc}
    results = launch("class_center", nproc, backend=backend, rounds=rounds, **settings)
    device = "GPUs" if backend == "nccl" else "CPUs"
    return report(results, {"nproc": nproc, "rounds": rounds, **settings}, device)


def report(found: dict[str, Any], settings: dict[str, int], device: str) -> Report:
    """Turn times into a table and findings."""
    times, bases = found["times"], (LEGACY, SORT)
    agree = "are equal" if found["equal"] else "DIFFER"
    return Report(
        name="class-center",
        caption=CAPTION.format(device=device, **settings),
        columns=timing_columns("ms", bases),
        rows=tuple(timing_rows(times, bases, 1e3)),
        findings=(
            *(_finding(times, base, on_gpus=device == "GPUs") for base in bases),
            f"remapped labels of all calls {agree}",
        ),
        settings=settings,
    )


def _finding(times: Samples, base: str, *, on_gpus: bool) -> str:
    part = ratio(times[OURS], times[base]).middle
    return target(f"{OURS} / {base}", part, LIMIT, measurable=on_gpus)


def measure(backend: str, rounds: int, rows: int, classes: int) -> dict[str, Any]:
    """Return, on each rank, the times of all calls, and whether their remapped labels agree."""
    with ring_and_group(backend) as ring:
        size = max(1, classes // ring.size)
        torch.manual_seed(0)  # every rank has the labels of the whole batch
        label = torch.randint(size * ring.size, (rows,)).to(ring.device)
        samples = max(1, size // SHARE)
        keys = torch.randint(size, (size,), device=ring.device)
        work: dict[str, Callable[[], Any]] = {
            OURS: partial(ops.class_center_sample, label, size, samples),
            PADDED: partial(ops.class_center_sample, label, size, samples, padded=True),
            LEGACY: partial(_legacy, ring, label, size, samples),
            SORT: partial(torch.sort, keys, stable=True),
        }
        remapped = [work[name]()[0] for name in (LEGACY, OURS, PADDED)]
        equal = all(torch.equal(one, remapped[0]) for one in remapped)
        calls = {name: partial(_settled, call, settler(ring)) for name, call in work.items()}
        return {"times": race(calls, rounds=rounds, calls=CALLS), "equal": equal}


def _settled(call: Callable[[], Any], settle: Callable[[], object]) -> None:
    call()
    settle()


def _legacy(
    ring: CommContext, label: torch.Tensor, classes: int, samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The legacy kernel's steps, with the intended rule of the counts of each rank."""
    sizes = label.new_zeros(ring.size)
    sizes[ring.rank] = classes
    if ring.size > 1:
        dist.all_reduce(sizes)
    edges = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    unique, places = label.unique(return_inverse=True)
    starts = torch.searchsorted(unique, edges)
    counts = starts.diff().clamp(min=samples)
    begins = counts.cumsum(0) - counts
    owner = torch.bucketize(label, edges, right=True) - 1
    remapped = places + (begins - starts[:-1])[owner]
    first, end, base, count = torch.stack(
        [starts[ring.rank], starts[ring.rank + 1], edges[ring.rank], counts[ring.rank]]
    ).tolist()
    positives = unique[first:end] - base
    keys = torch.randint(classes, (classes,), device=label.device)
    keys[positives] = positives - classes
    return remapped, keys.sort(stable=True)[1][:count]
