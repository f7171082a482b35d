"""A small run of every kernel, for `make memcheck`: compute-sanitizer watches what they touch."""

import torch

import commlib
from commlib import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 7, 64, 1001, 70_001)  # the last ones in several blocks, and in two hops where used


def main() -> None:
    comm = commlib.init("nccl", timeout=120.0)  # everything takes its time under the tool
    for items in LENGTHS:
        for dtype in DTYPES:
            reductions(comm, items, dtype)
        movements(comm, items)
    for rows, width in ((1, 8), (3, 1024), (40, 4096)):
        norms(comm, rows, width)
    exchanged_rows(comm)
    comm.reset()
    reductions(comm, 100, torch.float32)
    torch.cuda.synchronize()
    comm.check()
    if comm.rank == 0:
        print("right", comm.explain(64, torch.float32))
    commlib.shutdown()


def reductions(comm: commlib.CommContext, items: int, dtype: torch.dtype) -> None:
    for op, want in (("sum", comm.size), ("avg", 1), ("max", 1), ("min", 1)):
        for shift in (0, 1):
            x = torch.ones(items + shift, dtype=dtype, device=comm.device)[shift:]
            all_are(comm.all_reduce(torch.empty_like(x), x, op=op), want)
    whole, part = (
        torch.ones(n, dtype=dtype, device=comm.device) for n in (items * comm.size, items)
    )
    all_are(comm.reduce_scatter(torch.empty_like(part), whole), comm.size)
    work = comm.all_reduce_begin(torch.empty_like(part), part)
    all_are(work.wait(), comm.size)


def movements(comm: commlib.CommContext, items: int) -> None:
    part = torch.ones(items, dtype=torch.uint8, device=comm.device)
    whole = torch.zeros(items * comm.size, dtype=torch.uint8, device=comm.device)
    all_are(comm.all_gather(whole, part), 1)
    all_are(comm.all_to_all(torch.zeros_like(whole), whole), 1)


def norms(comm: commlib.CommContext, rows: int, width: int) -> None:
    for dtype in DTYPES:
        x = torch.ones(rows, width, dtype=dtype, device=comm.device)
        weight = torch.ones(width, dtype=dtype, device=comm.device)
        for norm in ("rms", "layer"):
            y, total = ops.all_reduce_residual_norm(x, x, weight, norm=norm)
            all_are(total, comm.size + 1)
            assert bool(y.isfinite().all())


def exchanged_rows(comm: commlib.CommContext) -> None:
    x = torch.ones(comm.size * 3, 17, device=comm.device)
    counts = torch.full((comm.size,), 3)
    all_are(ops.global_scatter(x, counts, counts), 1)


def all_are(x: torch.Tensor, value: float) -> None:
    assert set(x.flatten().tolist()) == {float(value)}, (x, value)


if __name__ == "__main__":
    main()
