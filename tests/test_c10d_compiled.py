"""Calls of ``torch.distributed`` at which torch.compile leaves a function: they run eagerly."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.support.runs_on import runs_on
from tests.support.torch_groups import assert_same_as_stock

Tensor = torch.Tensor


def later(x: Tensor) -> Tensor:
    y = x * 2
    work: Any = dist.all_reduce(y, async_op=True)
    work.wait()
    return y + 1


def copied(x: Tensor) -> Tensor:
    y = x * 2
    dist.broadcast(y, 0)
    dist.barrier()
    return y + 1


def exchanged(x: Tensor) -> Tensor:
    y, other = torch.zeros_like(x), 1 - dist.get_rank()
    if other == 1:  # NCCL needs a send on one rank while the other one receives
        works: list[Any] = [dist.isend(x, other), dist.irecv(y, other)]
    else:
        works = [dist.irecv(y, other), dist.isend(x, other)]
    for work in works:
        work.wait()
    return y + 1


def in_a_batch(x: Tensor) -> Tensor:
    y, other = torch.zeros_like(x), 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return y + 1


def in_lists(x: Tensor) -> Tensor:
    y, parts = torch.zeros_like(x), [torch.zeros_like(x) for _ in range(2)]
    dist.reduce_scatter(y, [x, x * 3])
    dist.scatter(y, [y, y + 1] if dist.get_rank() == 0 else None, src=0)
    dist.gather(y, parts if dist.get_rank() == 0 else None, dst=0)
    return y + parts[1]


STEPS: tuple[Callable[[Tensor], Tensor], ...] = (later, copied, exchanged, in_a_batch, in_lists)


def compiled(device: torch.device) -> Any:
    results = []
    for step in STEPS:
        torch._dynamo.reset()
        x = torch.arange(3.0, device=device) + dist.get_rank()
        results.append(torch.compile(step)(x))
    return results


@runs_on("ranks", deadline=240)
def test_calls_that_break_a_graph(ring: Any) -> None:
    """Dynamo begins again after each of them, also in what they call: it must not trace that."""
    assert_same_as_stock(ring, compiled)
