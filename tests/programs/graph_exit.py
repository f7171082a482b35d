"""One rank that ends with graphs still alive; its argument names what it releases first.

``nothing``: everything is left to the interpreter's exit. ``ring``: the communicator is closed on
purpose while a graph and an output are held. ``manager``: ``shutdown(abort=True)``.
"""

import sys

import torch

import commlib
from commlib import graph, ops


def main(before: str) -> None:
    comm = commlib.init()
    ring = commlib.new_ring(1, range(comm.size))
    assert ring is not None
    x = torch.ones(1000, device=comm.device)
    held = []
    for ring_id in (0, 1):
        step = graph.capture(lambda t, ring_id=ring_id: ops.all_reduce(t, ring_id) + 1)
        for _ in range(3):
            out = step(x)
        held.append((step, out))
        assert set(out.tolist()) == {comm.size + 1.0}
    if before == "ring":
        commlib.CommContextManager.instance().close(1)
    elif before == "manager":
        commlib.shutdown(abort=True)
    globals()["held"] = held  # alive until the interpreter takes the module apart
    if comm.rank == 0:
        print("used")


if __name__ == "__main__":
    main(sys.argv[1])
