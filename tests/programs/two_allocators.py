"""Memory and launches of the same graphs under both allocators of torch, each in a fresh process.

python -m tests.programs.two_allocators
"""

import json
import os
import subprocess
import sys

import commlib  # before torch, which fixes its allocator

# isort: split
import torch

from commlib import flags, graph
from commlib.graph.tables import text_table

WIDTH, SIZES, STEPS = 512, (64, 256, 128), 5
COLUMNS = {
    "allocator": "allocator",
    "graphs": "graphs",
    "nodes": "nodes",
    "graphs' bytes": "graph_bytes",
    "total bytes": "total_bytes",
    "launch µs": "launch_us",
}


def main() -> None:
    """Print one table, a line per allocator."""
    if "measure" in sys.argv[1:]:
        print(json.dumps(measured()))
        return
    rows = []
    for value in ("0", "1"):
        command = [sys.executable, "-m", "tests.programs.two_allocators", "measure"]
        environment = {**os.environ, flags.MALLOC_ASYNC: value}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(text_table(COLUMNS, rows))


def measured() -> dict[str, object]:
    """Train a small model with three sizes of batches from graphs; return what these take."""
    device = commlib.init().device
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
    ).to(device)
    captured = graph.capture(model, outputs="copy")
    for _ in range(STEPS):
        for size in SIZES:
            model.zero_grad(set_to_none=False)
            captured(torch.ones(size, WIDTH, device=device)).square().mean().backward()
    report = graph.report(captured)
    (memory,) = report.memory
    launches = [row["launch_us"] for row in report]
    stats = {
        **memory,
        "graphs": sum(row["segments"] for row in report),
        "nodes": sum(row["nodes"] for row in report),
        "launch_us": round(sum(launches) / len(launches), 1),
    }
    captured.reset()
    commlib.shutdown()
    return stats


if __name__ == "__main__":
    main()
