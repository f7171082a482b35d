"""A launch of one benchmark's ranks on this machine, through torch's elastic launcher."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import commlib
from commlib import flags
from commlib.tools._demo_runs import LAUNCH_MARGIN_S, LaunchError, _end, _last_words

RANK_DEADLINE_S = 300.0  # then a rank prints its stack and exits


def launch(name: str, nproc: int, *, unified: bool = True, **settings: object) -> Any:
    """Run ``measure(**settings)`` of the benchmark ``name`` on ``nproc`` ranks.

    Returns what it returned on rank 0. Raises ``LaunchError`` with the ranks' last words when one
    fails or the deadline passes.
    """
    with tempfile.TemporaryDirectory(prefix="commlib-bench-") as folder:
        place = Path(folder)
        code = _execute(_command(name, nproc, settings, place), environment(unified), place)
        result = place / "result.json"
        if code or not result.exists():
            ended = "still running at the deadline" if code is None else f"exit code {code}"
            raise LaunchError(f"{name}: {ended}\n{_last_words(place)}")
        return json.loads(result.read_text())


def _command(name: str, nproc: int, settings: dict[str, object], place: Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(nproc)]
    launcher += ["--redirects", "3", "--log-dir", str(place / "logs")]
    rank = ["-m", "commlib.tools._bench_rank", name, json.dumps(settings)]
    return [*launcher, *rank, str(place / "result.json"), str(RANK_DEADLINE_S)]


def environment(unified: bool = True) -> dict[str, str]:
    """Return the environment of a measured process: this commlib, one thread, the flag."""
    root = str(Path(commlib.__file__).resolve().parent.parent)
    ours = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        flags.UNIFIED: str(int(unified)),
    }
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**loopback, **os.environ, **ours}


def _execute(command: list[str], env: dict[str, str], place: Path) -> int | None:
    """Return the exit code, or None when the deadline passed."""
    with (place / "launcher.log").open("w") as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(RANK_DEADLINE_S + LAUNCH_MARGIN_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
