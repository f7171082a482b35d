"""One rank of a two-node program, started by torchrun on each host: all verbs across the cable."""

import os

import torch

import commlib
from commlib import ops


def main() -> None:
    """Exchange over the world and over a ring that crosses the hosts; print what was seen."""
    torch.set_num_threads(1)
    world = commlib.init("nccl" if os.environ.get("TWO_NODES_GPU") else "gloo")
    node = int(os.environ["GROUP_RANK"])
    x = torch.arange(1000.0, device=world.device) + world.rank
    total = ops.all_reduce(x)
    torch.testing.assert_close(
        total, torch.arange(1000.0, device=world.device) * world.size + sum(range(world.size))
    )
    local, each = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    across = commlib.new_ring(1, range(local, world.size, each))
    assert across is not None
    nodes = ops.all_gather(torch.tensor([node], device=world.device), 1).tolist()
    other = 1 - across.rank
    with across.group():
        ops.send(x, 1, peer=other)
        got = ops.recv(torch.zeros_like(x), 1, peer=other)
    torch.testing.assert_close(got, x - world.rank + across.ranks[other])
    with open(os.environ["TWO_NODES_OUT"] + str(world.rank), "w") as out:
        out.write(f"rank {world.rank} of {world.size} on node {node}: ring 1 spans nodes {nodes}")


if __name__ == "__main__":
    main()
