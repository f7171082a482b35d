"""Benchmark `import`: what `import commlib` adds to `import torch` in a fresh interpreter."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from commlib.tools.bench.report import Report, target, timing_columns, timing_rows
from commlib.tools.bench.rounds import spread, turns
from commlib.tools.launch import LaunchError, environment

ROUNDS = 20
DEADLINE_S = 120
TORCH, BOTH, AFTER = "import torch", "import torch, commlib", "import commlib after torch"
LIMIT_MS = 60.0
CAPTION = (
    f"Time of the statement inside fresh interpreters, which alternate between `{TORCH}` and "
    f"`{BOTH}`; the last row is the second half of the latter. Byte code is compiled beforehand. "
    f"Target: {AFTER} at most {LIMIT_MS:g} ms; no CUDA context, no socket."
)
PROGRAM = """
import json, os, sys, time
began = time.perf_counter()
import torch
middle = time.perf_counter()
if "commlib" in sys.argv[1]:
    import commlib
ended = time.perf_counter()
folder = "/proc/self/fd"
opened = os.listdir(folder) if os.path.isdir(folder) else []
links = [os.readlink(f"{folder}/{fd}") for fd in opened if os.path.exists(f"{folder}/{fd}")]
sockets = sum("socket:" in link for link in links) if opened else None
contexts = int(torch.cuda.is_initialized())
print(json.dumps(dict(whole=ended - began, after=ended - middle, sockets=sockets, cuda=contexts)))
"""

Run = dict[str, Any]


def refusal(nproc: int) -> str | None:
    """Say why the benchmark can't run here: it always can, and starts no ranks."""
    return None


def run(nproc: int, rounds: int) -> Report:
    """Start ``2 * rounds + 1`` interpreters, one after the other; ``nproc`` does not matter."""
    runs: dict[str, list[Run]] = {TORCH: [], BOTH: []}
    _interpreter(BOTH)  # fills the caches
    for number in range(rounds):
        for statement in turns(list(runs), number):
            runs[statement].append(_interpreter(statement))
    return report(runs, {"rounds": rounds})


def report(runs: dict[str, list[Run]], settings: dict[str, int]) -> Report:
    """Turn the interpreters' figures into a table and findings."""
    samples = {statement: [one["whole"] for one in each] for statement, each in runs.items()}
    samples[AFTER] = [one["after"] for one in runs[BOTH]]
    return Report(
        name="import",
        caption=CAPTION,
        columns=timing_columns("ms", (TORCH,)),
        rows=tuple(timing_rows(samples, (TORCH,), 1e3)),
        findings=(
            target(AFTER, spread(samples[AFTER]).middle * 1e3, LIMIT_MS, " ms"),
            *(_opened(statement, each) for statement, each in runs.items()),
        ),
        settings=settings,
    )


def _opened(statement: str, runs: Sequence[Run]) -> str:
    """Say what any of the interpreters had opened after ``statement``."""
    counts = [one["sockets"] for one in runs]
    sockets = "unknown number of" if None in counts else max(counts)
    return f"{statement}: {max(one['cuda'] for one in runs)} CUDA contexts, {sockets} sockets open"


def _interpreter(statement: str) -> Run:
    command = [sys.executable, "-c", PROGRAM, statement]
    keeping = environment(unified=True)
    keeping.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its byte code
    done = subprocess.run(
        command,
        env=keeping,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    if done.returncode:
        raise LaunchError(f"{statement}: exit code {done.returncode}\n{done.stderr}")
    result: Run = json.loads(done.stdout.splitlines()[-1])
    return result
