"""One rank with an allocator that the environment names: captured and eager calls are right."""

import os
from collections.abc import Callable

import torch

import commlib


def main() -> None:
    comm = commlib.init()
    x = torch.ones(20_000_000, dtype=torch.bfloat16, device=comm.device)  # several segments
    out = torch.zeros_like(x)

    def step() -> None:
        comm.all_reduce(out, x)
        comm.all_reduce(out[:1000], x[1:1001])

    replay = captured(step) if comm.device.type == "cuda" else step
    for value in (1.0, 2.0):
        x.fill_(value)
        replay()
        assert set(out.unique().tolist()) == {value * comm.size}
        small = torch.full((100,), value, device=comm.device)
        assert set(comm.all_reduce(small, small).tolist()) == {value * comm.size}
    if comm.rank == 0:
        print("right", comm.explain(64, torch.float32), os.environ["PYTORCH_CUDA_ALLOC_CONF"])
    commlib.shutdown()


def captured(step: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


if __name__ == "__main__":
    main()
