"""`commlib demo`: run one legacy program on two engines in two modes, and compare the bits."""

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

HEADS = 8  # attention heads of the program, which are split over the ranks
STEPS = 6


def run_demo(
    nproc: int = 2,
    json_path: str | None = None,
    *,
    steps: int = STEPS,
    compiler: str = "inductor",
) -> int:
    """Run the example in four modes on ``nproc`` ranks of this machine and show one table.

    The ranks use NCCL if there are at least ``nproc`` GPUs, else the CPU and gloo.

    Args:
        nproc: Number of ranks.
        json_path: File for the table, every raw result and the reports of the runs.
        steps: Training steps per run.
        compiler: Backend of torch.compile.

    Returns:
        0 if all results agree, 1 if one does not or a run fails, 2 if the demo can't start.
    """
    progress = Console(stderr=True)
    refusal = _refusal(nproc) or (file_refusal(json_path) if json_path else None)
    if refusal:
        _print(progress, refusal, "red")
        return 2
    backend, reason = _backend(nproc)
    _print(progress, f"{nproc} ranks, {backend}: {reason}")
    try:
        reports = _run_all(progress, nproc, backend, steps, compiler)
    except LaunchError as error:
        _print(progress, str(error), "red")
        return 1
    return conclude(reports, backend, json_path)


def conclude(reports: Mapping[Mode, Report], backend: str, json_path: str | None = None) -> int:
    """Compare the reports of all runs, show the table, write the JSON; return the exit code."""
    console = Console()
    rows = compare(reports, backend)
    failures = [failure for row in rows for failure in row.failures]
    console.print(table.table(rows, reports))
    for failure in failures:
        _print(console, failure, "red")
    _print(console, f"{len(failures)} mismatches" if failures else "all results agree")
    if json_path:
        Path(json_path).write_text(json.dumps(_document(rows, reports, backend), indent=1))
    return 1 if failures else 0


def _print(console: Console, text: str, style: str | None = None) -> None:
    """Print ``text`` without wrapping and without markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _refusal(nproc: int) -> str | None:
    """Return why the demo can't start and what to do instead; None if it can."""
    if nproc < 2 or HEADS % nproc:
        return f"{nproc} ranks: the program splits {HEADS} heads; pass --nproc 2, 4 or 8"
    if not PROGRAM.exists():
        return (
            f"{PROGRAM} does not exist: an installed commlib has no examples. "
            "Run the demo from a checkout: `pip install -e .[tools]`, then `commlib demo`"
        )
    return None


def _backend(nproc: int) -> tuple[str, str]:
    """Return the backend of the ranks and the reason for this choice."""
    gpus = torch.cuda.device_count()
    if gpus < nproc:
        return "gloo", f"{gpus} GPUs here, so the ranks use the CPU"
    if importlib.util.find_spec("cupy") is None:
        install = "run pip install -e '.[cuda13,tools]' or '.[cuda12,tools]'"
        return "gloo", f"{gpus} GPUs here, but CuPy is not installed; {install}"
    return "nccl", f"one GPU per rank, of {gpus}"


def _run_all(
    progress: Console, nproc: int, backend: str, steps: int, compiler: str
) -> dict[Mode, Report]:
    """Run the modes one after the other, and print a line of progress for each."""
    reports = {}
    with tempfile.TemporaryDirectory(prefix="commlib-demo-") as folder:
        launch = Launch(nproc, backend, steps, Path(folder), compiler=compiler)
        for number, mode in enumerate(MODES, 1):
            name = f"{number} of {len(MODES)}: {mode.label}"
            with progress.status(name):
                reports[mode] = launch.run(mode)
            _print(progress, f"{name}, {reports[mode]['seconds']:.1f} s")
    return reports


def _document(rows: list[Row], reports: Mapping[Mode, Report], backend: str) -> dict[str, Any]:
    """Return all results of the demo in a form for JSON."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "backend": backend,
        "agree": not any(row.failures for row in rows),
        "rows": [asdict(row) for row in rows],
        "runs": {mode.label: report for mode, report in reports.items()},
    }
