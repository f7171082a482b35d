"""Serve a tensor-parallel model from files: export, compile ahead of time, load, capture.

Each rank holds a part of the hidden layer, and one all-reduce adds the parts. The first start
exports the model on each rank and compiles it with AOTInductor. The second start, of new processes,
loads the packages, and compares their results with eager code, bit for bit:

    torchrun --standalone --nproc-per-node 2 examples/exported_inference.py save /tmp/block
    torchrun --standalone --nproc-per-node 2 examples/exported_inference.py run /tmp/block

A package needs a process that has imported commlib, which registers its ops. Without it torch says
"Could not find schema for commlib::all_reduce".

Exit code 1 if any result differs.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import commlib
from commlib import export, graph, ops

WIDTH, HIDDEN, ROWS, CALLS = 32, 64, 4, 4


class Block(torch.nn.Module):
    """This rank's part of two layers without biases."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        into = torch.randn(WIDTH, HIDDEN, generator=draw) / WIDTH**0.5
        back = torch.randn(HIDDEN, WIDTH, generator=draw) / HIDDEN**0.5
        self.into = torch.nn.Parameter(into.chunk(size, 1)[rank].contiguous())
        self.back = torch.nn.Parameter(back.chunk(size, 0)[rank].contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, the same on every rank."""
        part = torch.relu(x @ self.into) @ self.back
        return ops.all_reduce(part, ring_id=0, op="sum", use_calc_stream=True) + x


def save(block: Block, x: Tensor, path: Path) -> None:
    """Export the model and compile it into one file; nothing is communicated."""
    program = torch.export.export(block, (x,))
    export.aoti_compile_and_package(program, package_path=path)


def equal(call: Callable[[Tensor], Tensor], block: Block, device: torch.device) -> bool:
    """Compare some calls with eager ones, bit for bit."""
    draw = torch.Generator().manual_seed(2)
    inputs = [torch.randn(ROWS, WIDTH, generator=draw).to(device) for _ in range(CALLS)]
    differing = sum(not torch.equal(call(x), block(x)) for x in inputs)  # no rank stops early
    return differing == 0


@torch.no_grad()
def main() -> int:
    """Save, or load and compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=("save", "run"))
    parser.add_argument("directory", type=Path, help="where the packages are")
    chosen = parser.parse_args()
    ring = commlib.init()
    path = chosen.directory / f"rank{ring.rank}of{ring.size}.pt2"
    block = Block(ring.rank, ring.size).to(ring.device)
    if chosen.step == "save":
        save(block, torch.zeros(ROWS, WIDTH, device=ring.device), path)
        return 0
    if not path.exists():
        parser.exit(2, f"{path}: no such file; call it with `save` first\n")
    package = export.aoti_load_package(path, run_single_threaded=True)
    same = {
        "package": equal(package, block, ring.device),
        "captured": equal(graph.capture(package), block, ring.device),
    }
    if ring.rank == 0:
        for name, outcome in same.items():
            print(f"{name}: {'bit for bit the same' if outcome else 'the results differ'}")
    commlib.shutdown()
    return int(not all(same.values()))


if __name__ == "__main__":
    sys.exit(main())
