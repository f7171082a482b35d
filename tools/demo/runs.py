"""Runs of the demo: the example program on every rank, in one mode."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commlib.tools.launch import environment, launch

PROGRAM = Path(__file__).resolve().parent.parent.parent / "examples" / "legacy_tp_block.py"
RANK_DEADLINE_S = 240.0  # a rank past it prints its stack and exits; the slowest run took 46 s

Report = dict[str, Any]


@dataclass(frozen=True)
class Mode:
    """Mode of a run: the flag, and eager or compiled."""

    unified: bool
    compiled: bool

    @property
    def flag(self) -> str:
        """The flag as text: on or off."""
        return "on" if self.unified else "off"

    @property
    def label(self) -> str:
        """Name of the run in tables, messages and JSON."""
        return f"flag {self.flag}, {'compiled' if self.compiled else 'eager'}"


MODES = tuple(Mode(unified, compiled) for compiled in (False, True) for unified in (False, True))


@dataclass(frozen=True)
class Launch:
    """Settings of all runs of one demo, and the folder for their files."""

    ranks: int
    backend: str
    steps: int
    folder: Path
    deadline: float = RANK_DEADLINE_S
    compiler: str = "inductor"

    def run(self, mode: Mode) -> Report:
        """Run the program in ``mode``; return the report of rank 0 and the seconds of the run.

        Raises ``LaunchError`` if a rank fails or the deadline passes.
        """
        folder = self.folder / mode.label.replace(", ", "_").replace(" ", "_")
        folder.mkdir()
        results, start = folder / "results.json", time.perf_counter()
        # Trace every graph again: this cache misses a changed backward of an operator.
        variables = environment(mode.unified, TORCHINDUCTOR_AUTOGRAD_CACHE="0")
        program = self._program(mode, results)
        launch(mode.label, program, self.ranks, variables, folder, self.deadline)
        report: Report = json.loads(results.read_text())
        return report | {"seconds": time.perf_counter() - start}

    def _program(self, mode: Mode, results: Path) -> list[str]:
        program = [str(PROGRAM), "--backend", self.backend, "--steps", str(self.steps)]
        program += ["--deadline", str(self.deadline), "--json", str(results)]
        return program + ["--compile", self.compiler] * mode.compiled
