"""`commlib bench`: each speed claim against its named peers, in one run on this machine."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from commlib.p2p import kernel_table
from commlib.tools.bench import (
    allreduce,
    attention,
    capture,
    class_center,
    compiled,
    cross_entropy,
    decode,
    dispatch,
    experts,
    fsdp_tp,
    gloo,
    host,
    import_time,
    lamb,
    llama,
    memory,
    overlap,
    pipeline,
    quantized,
    tune,
)
from commlib.tools.bench.c10d import decode as c10d_decode
from commlib.tools.bench.c10d import training as c10d_training
from commlib.tools.bench.machine import facts
from commlib.tools.bench.peers.folder import refusal as peers_refusal
from commlib.tools.bench.report import Report, show, write
from commlib.tools.launch import LaunchError
from commlib.tools.paths import folder_refusal


class Benchmark(Protocol):
    """The names that a module needs to be a benchmark."""

    ROUNDS: int

    def refusal(self, nproc: int, /) -> str | None:
        """Say why it can't run here and what to type; None when it can."""

    def run(self, nproc: int, rounds: int) -> Report:
        """Measure and return the report; raises ``LaunchError``."""


BENCHMARKS: Mapping[str, Benchmark] = {
    "host": host,
    "gloo": gloo,
    "import": import_time,
    "memory": memory,
    "cross-entropy": cross_entropy,
    "experts": experts,
    "dispatch": dispatch,
    "class-center": class_center,
    "attention": attention,
    "lamb": lamb,
    "allreduce": allreduce,
    "capture": capture,
    "compiled": compiled,
    "llama": llama,
    "decode": decode,
    "quantized": quantized,
    "overlap": overlap,
    "pipeline": pipeline,
    "fsdp-tp": fsdp_tp,
    "c10d": c10d_training,
    "c10d-decode": c10d_decode,
}


def run_bench(
    names: tuple[str, ...],
    out: str | None,
    *,
    nproc: int = 2,
    rounds: int | None = None,
    **options: Any,
) -> int:
    """Run the benchmarks ``names``, or all that this machine can, and show a table of each.

    ``out`` is a folder for one Markdown file each; ``rounds`` replaces each benchmark's own
    number, and ``options`` the usual sizes and peers of a benchmark whose ``OPTIONS`` names them;
    None is the usual. Returns 0; 1 when a run fails; 2 when a name is unknown, one named can't run
    here, ``out`` can't be written, or the folder of peers has no library.
    """
    progress = Console(stderr=True)
    passed = {name: value for name, value in options.items() if value is not None}
    refusal = _refusal(names, nproc, rounds, passed) or (folder_refusal(out) if out else None)
    if refusal:
        _say(progress, refusal, "red")
        return 2
    codes = [_one(progress, name, out, nproc, rounds, passed) for name in names or BENCHMARKS]
    return max(codes)


def run_tune(nproc: int, path: Path = kernel_table.TABLE) -> int:
    """Write the rows of ``nproc`` ranks into the table of kernels at ``path`` and show them.

    Returns 0; 1 when the run fails; 2 when it can't be done here.
    """
    progress = Console(stderr=True)
    refusal = tune.refusal(nproc)
    if refusal:
        _say(progress, f"the table can't be measured here: {refusal}", "red")
        return 2
    try:
        with progress.status("measuring the kernels"):
            table = tune.tune(nproc, path)
    except (LaunchError, subprocess.TimeoutExpired) as error:
        _say(progress, f"measuring failed: {error}", "red")
        return 1
    for collective, rows in table.items():
        for row in rows:
            _say(
                progress,
                f"{collective}, {nproc} ranks, up to {row.most}: {', '.join(map(str, row[1:]))}",
            )
    _say(progress, f"written: {path}")
    return 0


def _refusal(
    names: tuple[str, ...], nproc: int, rounds: int | None, options: dict[str, Any]
) -> str | None:
    """Say what of the request can't be done, before any of it is."""
    if rounds is not None and rounds < 1:
        return f"{rounds} rounds: expected 1 or more; pass --rounds 10, or remove it"
    refusal = peers_refusal(options["peers"], names) if "peers" in options else None
    if refusal:
        return refusal
    for name in names:
        if name not in BENCHMARKS:
            return f"there is no benchmark {name!r}; benchmarks here: {', '.join(BENCHMARKS)}"
        unknown = sorted(set(options) - _options(name))
        if unknown:
            return f"{name} has no option {unknown[0]!r}; remove --{unknown[0]}"
        refusal = BENCHMARKS[name].refusal(nproc)
        if refusal:
            return f"{name} can't run here: {refusal}"
    return None


def _options(name: str) -> set[str]:
    """Return the sizes and peers that a benchmark accepts; most have none."""
    return set(getattr(BENCHMARKS[name], "OPTIONS", ()))


def _one(
    progress: Console,
    name: str,
    out: str | None,
    nproc: int,
    rounds: int | None,
    options: dict[str, Any],
) -> int:
    """Run one benchmark and show it; return its exit code."""
    benchmark = BENCHMARKS[name]
    refusal = benchmark.refusal(nproc)
    if refusal:
        _say(progress, f"{name} is left out: {refusal}")
        return 0
    machine = facts()
    run: Any = benchmark.run
    kwargs = {option: value for option, value in options.items() if option in _options(name)}
    try:
        with progress.status(f"{name}, {rounds or benchmark.ROUNDS} rounds"):
            report = run(nproc, rounds or benchmark.ROUNDS, **kwargs)
    except (LaunchError, subprocess.TimeoutExpired) as error:
        _say(progress, f"{name} failed: {error}", "red")
        return 1
    show(Console(), report)
    if out:
        _say(progress, f"written: {write(Path(out), report, machine, nproc)}")
    return 0


def _say(console: Console, text: str, style: str | None = None) -> None:
    """Print ``text`` as it is: unwrapped, and [brackets] are not markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
