"""A small run of every kernel, for `make memcheck`: compute-sanitizer watches what they touch."""

import torch

import commlib
from commlib import graph, ops
from commlib.engines.reduction_names import RingReduction

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
    experts(comm)
    comm.reset()
    experts(comm)
    reductions(comm, 100, torch.float32)
    torch.cuda.synchronize()
    comm.check()
    if comm.rank == 0:
        print("right", comm.explain(64, torch.float32))
    commlib.shutdown()


def reductions(comm: commlib.CommContext, items: int, dtype: torch.dtype) -> None:
    ops: dict[RingReduction, int] = {"sum": comm.size, "avg": 1, "max": 1, "min": 1}
    for op, want in ops.items():
        for shift in (0, 1):
            x = torch.ones(items + shift, dtype=dtype, device=comm.device)[shift:]
            all_are(comm.all_reduce(torch.empty_like(x), x, op=op), want)
    full, part = (
        torch.ones(n, dtype=dtype, device=comm.device) for n in (items * comm.size, items)
    )
    all_are(comm.reduce_scatter(torch.empty_like(part), full), comm.size)
    work = comm.all_reduce_begin(torch.empty_like(part), part)
    all_are(work.wait(), comm.size)


def movements(comm: commlib.CommContext, items: int) -> None:
    part = torch.ones(items, dtype=torch.uint8, device=comm.device)
    full = torch.zeros(items * comm.size, dtype=torch.uint8, device=comm.device)
    all_are(comm.all_gather(full, part), 1)
    all_are(comm.all_to_all(torch.zeros_like(full), full), 1)


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


def experts(comm: commlib.CommContext) -> None:
    """Run the kernels of the expert exchange, with few and many tokens, none on the last rank."""
    for tokens in (1, 5, 130):
        for dtype in DTYPES:
            for ids in (torch.int32, torch.int64):
                there_and_back(comm, tokens if comm.rank + 1 < comm.size else 0, dtype, ids)
        quantized(comm, tokens)
    masked_and_dropped(comm)
    left_out(comm)
    counted_rows(comm)
    replayed(comm)


def choices(comm: commlib.CommContext, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Return two experts per token, and the number of experts, which ranks do not divide."""
    number = 2 * comm.size + 1
    ids = torch.arange(2 * tokens, dtype=dtype, device=comm.device) + comm.rank
    return ids.view(tokens, 2) % number, number


def there_and_back(
    comm: commlib.CommContext, tokens: int, dtype: torch.dtype, ids_dtype: torch.dtype
) -> None:
    """Dispatch and combine ones; the gradients launch the kernels that move rows again."""
    ids, number = choices(comm, tokens, ids_dtype)
    x = torch.ones(tokens, 256, dtype=dtype, device=comm.device, requires_grad=True)
    weights = torch.full((tokens, 2), 0.5, device=comm.device, requires_grad=True)
    sent = ops.expert_dispatch(x, ids, number, 130 * comm.size, weights=weights)
    used_are(sent.rows, sent.counts, 1)
    total = ops.expert_combine(sent.rows, sent.handle)
    total.sum().backward()
    plain = ops.expert_combine(sent.rows.detach(), sent.handle, weighted=False)
    if tokens:
        assert x.grad is not None and weights.grad is not None
        for actual, value in ((total, 1), (x.grad, 1), (weights.grad, 256), (plain, 2)):
            all_are(actual, value)


def quantized(comm: commlib.CommContext, tokens: int) -> None:
    for dtype in DTYPES:
        x = torch.ones(tokens, 256, dtype=dtype, device=comm.device)
        ids, number = choices(comm, tokens, torch.int32)
        sent = ops.expert_dispatch(x, ids, number, tokens * comm.size, quantize="fp8")
        assert sent.scales is not None
        rows = sent.rows.float().unflatten(2, (-1, 128)) * sent.scales[..., None]
        used_are(rows.round(decimals=3), sent.counts, 1)


def masked_and_dropped(comm: commlib.CommContext) -> None:
    """Leave no rank out by a mask, and drop all but one row of an expert."""
    x = torch.ones(6, 64, device=comm.device)
    active = torch.ones(comm.size, dtype=torch.uint8, device=comm.device)
    ids = torch.zeros(6, dtype=torch.int64, device=comm.device)
    sent = ops.expert_dispatch(x, ids, 1, 1, on_overflow="drop", active=active)
    used_are(sent.rows, sent.counts, 1)
    all_are(sent.handle.demand, 6 * comm.size)
    total = ops.expert_combine(sent.rows, sent.handle)
    assert float(total.sum()) == (64 if comm.rank == 0 else 0), total


def left_out(comm: commlib.CommContext) -> None:
    """Leave the last rank out by a mask: its expert gets no row, and its tokens no result."""
    x = torch.ones(3 * comm.size, 64, device=comm.device)
    active = torch.ones(comm.size, dtype=torch.uint8, device=comm.device)
    active[-1] = 0
    ids = torch.arange(3 * comm.size, device=comm.device) % comm.size  # an expert of each rank
    sent = ops.expert_dispatch(x, ids, comm.size, len(x) * comm.size, active=active)
    used_are(sent.rows, sent.counts, 1)
    remaining = comm.size - 1
    takes_part = comm.rank < remaining
    assert sent.counts.tolist() == [3 * remaining if takes_part else 0], sent.counts
    total = ops.expert_combine(sent.rows, sent.handle)
    assert float(total.sum()) == (3 * 64 * remaining if takes_part else 0), total


def replayed(comm: commlib.CommContext) -> None:
    """Capture a dispatch, a combine and a sum, and replay them once with another input."""
    ids, number = choices(comm, 5, torch.int64)

    def step(x: torch.Tensor) -> torch.Tensor:
        sent = ops.expert_dispatch(x, ids, number, 10 * comm.size)
        return ops.all_reduce(ops.expert_combine(sent.rows, sent.handle))

    captured = graph.capture(step, outputs="copy")
    for value in (1, 3):
        all_are(
            captured(torch.full((5, 64), float(value), device=comm.device)), 2 * value * comm.size
        )
    assert [row["replays"] for row in graph.report(captured)] == [1], graph.report(captured)


def counted_rows(comm: commlib.CommContext) -> None:
    """Move rows with counts on the device, and back."""
    x = torch.ones(comm.size * 3, 64, device=comm.device)
    counts = torch.full((comm.size,), 3, device=comm.device)
    scattered = ops.global_scatter(x, counts, counts, capacity=len(x) + 2)
    all_are(scattered[: len(x)], 1)
    all_are(scattered[len(x) :], 0)
    all_are(ops.global_gather(scattered, counts, counts, capacity=len(x)), 1)


def used_are(rows: torch.Tensor, counts: torch.Tensor, value: float) -> None:
    """Check the used rows of each expert, and the zeros after them."""
    for expert, count in zip(rows, counts.tolist(), strict=True):
        for part, expected in ((expert[:count], value), (expert[count:], 0)):
            if len(part):
                all_are(part, expected)


def all_are(x: torch.Tensor, value: float) -> None:
    assert set(x.flatten().tolist()) == {float(value)}, (x, value)


if __name__ == "__main__":
    main()
