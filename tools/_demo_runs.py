"""One run of the demo: the example on every rank, launched through torch's elastic launcher."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import commlib
from commlib import flags

PROGRAM = Path(__file__).resolve().parent.parent / "examples" / "legacy_tp_block.py"
RANK_DEADLINE_S = 240.0  # then a rank prints its stack and exits; the slowest run took 46
LAUNCH_MARGIN_S = 60  # for the imports before a rank's deadline, and the launcher's end behind it
TAIL_LINES = 20

Report = dict[str, Any]


class LaunchError(RuntimeError):
    """A run ended without results; the text holds what its ranks said last."""


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
        began = time.perf_counter()
        code = self._execute(self._command(mode, place), self._environment(mode), place)
        results = place / "results.json"
        if code or not results.exists():
            ended = "still running at the deadline" if code is None else f"exit code {code}"
            raise LaunchError(f"{mode.label}: {ended}\n{_last_words(place)}")
        report: Report = json.loads(results.read_text())
        return report | {"seconds": time.perf_counter() - began}

    def _command(self, mode: Mode, place: Path) -> list[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(self.ranks)]
        launcher += ["--redirects", "3", "--log-dir", str(place / "logs")]
        program = [str(PROGRAM), "--backend", self.backend, "--steps", str(self.steps)]
        program += ["--deadline", str(self.deadline), "--json", str(place / "results.json")]
        return launcher + program + ["--compile", self.compiler] * mode.compiled

    def _environment(self, mode: Mode) -> dict[str, str]:
        root = str(Path(commlib.__file__).resolve().parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        ours = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            # Trace every graph anew: this cache does not see that an operator's backward changed.
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
            flags.UNIFIED: str(int(mode.unified)),
        }
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        return {**loopback, **os.environ, **ours}

    def _execute(self, command: list[str], environment: dict[str, str], place: Path) -> int | None:
        """Return the exit code, or None when the deadline passed."""
        with (place / "launcher.log").open("w") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                return process.wait(self.deadline + LAUNCH_MARGIN_S)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Let the launcher end its ranks, also when the user presses Ctrl-C."""
    process.terminate()
    try:
        process.wait(40)  # the launcher itself gives its ranks 30 s
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(place: Path) -> str:
    """Return the end of every rank's stderr, or of the launcher's where no rank began."""
    logs = sorted(place.glob("logs/**/stderr.log"))
    spoken = [log for log in logs if log.stat().st_size] or [place / "launcher.log"]
    return "\n".join(_tail(log) for log in spoken)


def _tail(log: Path) -> str:
    who = f"rank {log.parent.name}" if log.name == "stderr.log" else "launcher"
    lines = log.read_text(errors="replace").splitlines()
    # A rank past its deadline prints the innermost call first; any other failure prints it last.
    stacks = [number for number, line in enumerate(lines) if line.startswith("Timeout (")]
    first = stacks[-1] if stacks else max(0, len(lines) - TAIL_LINES)
    return "\n".join([f"--- {who}, last lines:", *lines[first : first + TAIL_LINES]])
