"""Programs of torch on the backend "commlib" that record a ``torch.cuda.CUDAGraph`` themselves."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, initialised
from tests.test_c10d_captures import WIDTH, decoded, split_decoder


def recorded(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return a graph of a step, after a first call that connects the ring."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # a graph of another test that goes in a capture would end it
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


@pytest.mark.parametrize("items", [5, 70_000, 1 << 20])
@runs_on("gpu_ranks")
def test_all_reduce(ring: Any, items: int) -> None:
    """In the order of the stream, and asynchronous with its wait in the graph."""
    with initialised(ring, OURS[ring.device.type]):
        x = torch.zeros(items, device=ring.device)
        total, most = torch.zeros_like(x), torch.zeros_like(x)

        def step() -> None:
            total.copy_(x)
            dist.all_reduce(total)
            most.copy_(total * (ring.rank + 1))
            work: Any = dist.all_reduce(most, dist.ReduceOp.MAX, async_op=True)
            work.wait()
            most.add_(1)

        graph = recorded(step)
        for turn in range(5):
            x.fill_(turn + ring.rank)
            if turn == 3:  # an eager call among the replays
                step()
            else:
                graph.replay()
            want = 2.0 * turn + 1
            assert_equal({*total.tolist()}, {want}, f"sums of turn {turn}")
            assert_equal({*most.tolist()}, {2 * want + 1}, f"maxima of turn {turn}")
        graph.reset()
        dist.barrier()


@runs_on("gpu_ranks", deadline=120)
def test_a_tensor_parallel_step(ring: Any) -> None:
    """A decode step of DTensors: the states are those of eager calls."""
    with initialised(ring, OURS[ring.device.type]):
        device = ring.device
        expected = decoded(split_decoder(device, ring.size), device)
        step = split_decoder(device, ring.size)
        x, out = torch.zeros(1, WIDTH, device=device), torch.zeros(1, WIDTH, device=device)
        position = torch.zeros(1, dtype=torch.int64, device=device)

        def run() -> None:
            out.copy_(step(x, position))

        graph = recorded(run)

        def replayed(given: Tensor, token: Tensor) -> Tensor:
            x.copy_(given)
            position.copy_(token)
            graph.replay()
            return out

        actual = decoded(replayed, device)
        for token, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_bits_equal(one, other, f"token {token}")
        graph.reset()
        dist.barrier()
