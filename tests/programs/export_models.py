"""Save the programs that tests/test_export.py loads: ``export_models DIRECTORY``, on two ranks."""

import sys
from pathlib import Path
from typing import Literal

import torch
from torch.export import Dim

import commlib
from commlib import export, ops

Reduction = Literal["sum", "prod", "min", "max", "avg"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "prod", "min", "max", "avg")
COLUMNS = 8
REVERSED = 3  # a ring of the same ranks in the other order


class EveryReduction(torch.nn.Module):
    """Every reduction on two rings and both streams, and as many calls with unused results.

    No two calls in a row have the same shape, so that none could be dropped or moved unnoticed.
    Scalings are powers of two, which no fused multiply-add rounds differently.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([0.5, 2.0, 1.0, 4.0, 0.25, 1.0, 2.0, 0.5]))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the results by reduction, ring and stream."""
        results: dict[str, torch.Tensor] = {}
        for ring_id in (0, REVERSED):
            for op in REDUCTIONS:
                for calc in (True, False):
                    count = 2 + len(results) % (COLUMNS - 2)
                    ops.all_reduce(x[:, 1:count], ring_id, op=op, use_calc_stream=calc)
                    part = torch.relu(x * self.scale)[:, :count] - 1
                    results[f"{op} {ring_id} {calc}"] = ops.all_reduce(
                        part, ring_id, op=op, use_calc_stream=calc
                    )
        return results


class OneRing(torch.nn.Module):
    """A program of the reversed ring alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ring, doubled."""
        return ops.all_reduce(x, REVERSED) * 2


class Writing(torch.nn.Module):
    """A program that writes to its buffer and to its input."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ring 0, and the number of calls added to it."""
        self.calls.add_(1)
        return ops.all_reduce(x.mul_(2)) + self.calls


def exported(model: torch.nn.Module, device: torch.device) -> torch.export.ExportedProgram:
    """Export a model for any number of rows."""
    x = torch.ones(6, COLUMNS, device=device)
    with torch.no_grad():
        rows = ({0: Dim("rows", min=2, max=64)},)
        return torch.export.export(model.to(device), (x,), dynamic_shapes=rows)


def main(directory: Path) -> None:
    """Let each rank save some of the files: they are not those of one rank."""
    ring = commlib.init()
    commlib.new_ring(REVERSED, [1, 0])
    every, device = exported(EveryReduction(), ring.device), ring.device
    if ring.rank == 0:
        export.aoti_compile_and_package(every, package_path=directory / "every_package.pt2")
        export.save(every, directory / "every.pt2", extra_files={"note": "kept"})
    else:
        one = exported(OneRing(), device)
        export.save(one.run_decompositions(), directory / "one_ring.pt2")
        torch.export.save(one, directory / "unrecorded.pt2")
    launched = ring.report()["calls"]
    if launched:
        sys.exit(f"{launched} collectives were launched by saving")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
