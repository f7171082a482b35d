"""One run of the demo: the example on every rank."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commlib.tools.launch import environment, launch

PROGRAM = Path(__file__).resolve().parent.parent.parent / "examples" / "legacy_tp_block.py"
RANK_DEADLINE_S = 240.0  # then a rank prints its stack and exits; the slowest run took 46

Report = dict[str, Any]


@dataclass(frozen=True)
class Mode:
    """What differs between two runs of the same program."""

    unified: bool
    compiled: bool

    @property
    def flag(self) -> str:
        """What the flag is set to: on or off."""
        return "on" if self.unified else "off"

    @property
    def label(self) -> str:
        """The run's name in tables, messages and JSON."""
        return f"flag {self.flag}, {'compiled' if self.compiled else 'eager'}"


MODES = tuple(Mode(unified, compiled) for compiled in (False, True) for unified in (False, True))


@dataclass(frozen=True)
class Launch:
    """How all runs of one demo are started: ranks, backend, steps, and a folder for their files."""

    ranks: int
    backend: str
    steps: int
    folder: Path
    deadline: float = RANK_DEADLINE_S
    compiler: str = "inductor"

    def run(self, mode: Mode) -> Report:
        """Run the program in ``mode``; return what its rank 0 reports, and the run's seconds.

        Raises ``LaunchError`` when a rank fails or the deadline passes.
        """
        place = self.folder / mode.label.replace(", ", "_").replace(" ", "_")
        place.mkdir()
        results, began = place / "results.json", time.perf_counter()
        # Trace every graph anew: this cache does not see that an operator's backward changed.
        where = environment(mode.unified, TORCHINDUCTOR_AUTOGRAD_CACHE="0")
        program = self._program(mode, results)
        launch(mode.label, program, self.ranks, where, place, self.deadline)
        report: Report = json.loads(results.read_text())
        return report | {"seconds": time.perf_counter() - began}

    def _program(self, mode: Mode, results: Path) -> list[str]:
        program = [str(PROGRAM), "--backend", self.backend, "--steps", str(self.steps)]
        program += ["--deadline", str(self.deadline), "--json", str(results)]
        return program + ["--compile", self.compiler] * mode.compiled
