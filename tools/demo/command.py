"""The main job, `commlib demo`: one legacy program, two engines, two modes, the same bits."""

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from commlib.tools.demo import table
from commlib.tools.demo.compare import Row, compare
from commlib.tools.demo.runs import MODES, PROGRAM, Launch, Mode, Report
from commlib.tools.launch import LaunchError
from commlib.tools.paths import file_refusal

HEADS = 8  # of the program's attention: they are split over the ranks
STEPS = 6


def run_demo(
    nproc: int = 2,
    json_path: str | None = None,
    *,
    steps: int = STEPS,
    compiler: str = "inductor",
) -> int:
    """Run the example in four modes on ``nproc`` ranks of this machine and show one table.

    Ranks use NCCL when there are at least ``nproc`` GPUs, else the CPU and gloo. ``json_path``
    also writes the table, every raw result and the reports of the runs. ``compiler`` is the backend
    of torch.compile. Returns 0 when all
    results agree, 1 when one does not or a run fails, 2 when the demo can't start.
    """
    progress = Console(stderr=True)
    refusal = _refusal(nproc) or (file_refusal(json_path) if json_path else None)
    if refusal:
        _say(progress, refusal, "red")
        return 2
    backend, why = _backend(nproc)
    _say(progress, f"{nproc} ranks, {backend}: {why}")
    try:
        reports = _run_all(progress, nproc, backend, steps, compiler)
    except LaunchError as error:
        _say(progress, str(error), "red")
        return 1
    return conclude(reports, backend, json_path)


def conclude(reports: Mapping[Mode, Report], backend: str, json_path: str | None = None) -> int:
    """Compare the reports of all runs, show the table, write the JSON; return the exit code."""
    console = Console()
    rows = compare(reports, backend)
    failures = [failure for row in rows for failure in row.failures]
    console.print(table.table(rows, reports))
    for failure in failures:
        _say(console, failure, "red")
    _say(console, f"{len(failures)} mismatches" if failures else "all results agree")
    if json_path:
        Path(json_path).write_text(json.dumps(_document(rows, reports, backend), indent=1))
    return 1 if failures else 0


def _say(console: Console, text: str, style: str | None = None) -> None:
    """Print ``text`` as it is: unwrapped, and [brackets] are no markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _refusal(nproc: int) -> str | None:
    """Say why the demo can't start, and what to type instead."""
    if nproc < 2 or HEADS % nproc:
        return f"{nproc} ranks: the program splits {HEADS} heads; type --nproc 2, 4 or 8"
    if not PROGRAM.exists():
        return (
            f"{PROGRAM} is not there: examples are no part of an installed commlib. "
            "Run the demo from a checkout: `pip install -e .[tools]` there, then `commlib demo`"
        )
    return None


def _backend(nproc: int) -> tuple[str, str]:
    """Return the library that moves the bytes, and why it was chosen."""
    gpus = torch.cuda.device_count()
    if gpus < nproc:
        return "gloo", f"{gpus} GPUs here, so the ranks use the CPU"
    if importlib.util.find_spec("cupy") is None:
        return "gloo", f"{gpus} GPUs here, but no CuPy; type `pip install commlib[cuda12]`"
    return "nccl", f"one of {gpus} GPUs a rank"


def _run_all(
    progress: Console, nproc: int, backend: str, steps: int, compiler: str
) -> dict[Mode, Report]:
    """Run every mode, one after the other, with a line of progress for each."""
    reports = {}
    with tempfile.TemporaryDirectory(prefix="commlib-demo-") as folder:
        launch = Launch(nproc, backend, steps, Path(folder), compiler=compiler)
        for number, mode in enumerate(MODES, 1):
            name = f"{number} of {len(MODES)}: {mode.label}"
            with progress.status(name):
                reports[mode] = launch.run(mode)
            _say(progress, f"{name}, {reports[mode]['seconds']:.1f} s")
    return reports


def _document(rows: list[Row], reports: Mapping[Mode, Report], backend: str) -> dict[str, Any]:
    """Return everything that the demo found, ready for JSON."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "backend": backend,
        "agree": not any(row.failures for row in rows),
        "rows": [asdict(row) for row in rows],
        "runs": {mode.label: report for mode, report in reports.items()},
    }
