"""Table of the demo: the results of every run, with its time, communicators and memory."""

from collections.abc import Callable, Mapping

from rich import box
from rich.table import Table
from rich.text import Text

from commlib.tools.demo.compare import COMPILER_TOLERANCE, FORMULA, REFERENCE, Cell, Row
from commlib.tools.demo.runs import Mode, Report

MEBIBYTE = 2**20
CAPTION = (
    f"Collectives: {REFERENCE.label}, is compared with NumPy, the other runs with it.\n"
    "Training: flag on is compared with flag off in the same mode, and compiled with eager, up to "
    f"{COMPILER_TOLERANCE:g}: the compiler fuses arithmetic.\n"
    "Times and memory are those of rank 0. A first compiled step compiles, or loads its code from "
    "torch's cache."
)


def table(rows: list[Row], reports: Mapping[Mode, Report]) -> Table:
    """Return the table of the demo: one column per run, the reference first."""
    first = reports[REFERENCE]
    grid = Table(
        title=f"{first['ranks']} ranks on {first['device']}",
        caption=CAPTION,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    grid.add_column("result", overflow="fold")
    for mode, report in reports.items():
        kind = "compiled" if mode.compiled else "eager"
        grid.add_column(
            f"flag {mode.flag}\n{report['engine']}\n{kind}", justify="right", overflow="fold"
        )
    series = first["training"]
    for part in ([r for r in rows if r.name not in series], [r for r in rows if r.name in series]):
        for row in part:
            if row.cells:
                grid.add_row(row.name, *(_text(row.cells[mode.label], mode) for mode in reports))
        grid.add_section()
    for name, show in COSTS.items():
        grid.add_row(name, *(show(report) for report in reports.values()))
    return grid


def _text(cell: Cell, mode: Mode) -> Text:
    """Return the text of a cell: green if bits are equal, red if the promise is broken."""
    if mode == REFERENCE and cell.good:
        return Text("matches" if cell.against == FORMULA else "reference")
    if cell.equal:
        return Text("bits equal", style="green")
    apart = "incomparable" if cell.difference is None else f"{cell.difference:.1e} apart"
    return Text(apart, style="yellow" if cell.good else "bold red")


def _communicators(report: Report) -> str:
    live = [row for row in report["communicators"] if row["communicator"]]
    size = sum(row["bytes"] or 0 for row in live)
    return f"{len(live)} ({_mebibytes(size)})" if size else str(len(live))


def _mebibytes(count: int) -> str:
    return f"{count / MEBIBYTE:.1f} MiB"


COSTS: dict[str, Callable[[Report], str]] = {
    "step, median": lambda report: f"{report['step_s'] * 1e3:.1f} ms",
    "first step": lambda report: f"{report['first_step_s']:.2f} s",
    "entire run": lambda report: f"{report['seconds']:.1f} s",
    "communicators": _communicators,
    "memory of first use": lambda report: _mebibytes(report["memory_bytes"]),
}
