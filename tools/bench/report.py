"""Report of one benchmark: a table on the screen, and the same in a Markdown file."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from commlib.tools.bench.folding import folded
from commlib.tools.bench.machine import Fact
from commlib.tools.bench.rounds import HIGHEST, LOWEST, Samples, Spread, ratio, spread

Row = tuple[str, ...]

NEEDS_GPUS = "not measured here, needs GPUs"


@dataclass(frozen=True)
class Report:
    """Result of one benchmark: a caption about the method, a table and findings.

    ``plot`` draws the table into a PNG file.
    """

    name: str
    caption: str
    columns: Row
    rows: tuple[Row, ...]
    findings: tuple[str, ...]
    settings: Mapping[str, object]
    plot: Callable[[Path], None] | None = None

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        options = (part for name, value in self.settings.items() for part in (f"--{name}", value))
        return shlex.join(["commlib", "bench", self.name, *map(str, options)])


def number(value: float) -> str:
    """Return ``value`` as text with at least three significant digits."""
    places = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{places}f}"


def timing_columns(unit: str, bases: Sequence[str], *heads: str, over: str | None = None) -> Row:
    """Return the header of a table whose rows come from ``timing_rows``."""
    ends = f"p{LOWEST}..p{HIGHEST}"
    more = () if over is None else (f"over {over}, {unit}",)
    ratios = (f"ratio to {base} ({ends})" for base in bases)
    return (*heads, "call", f"median {unit}", ends, *more, *ratios)


def timing_rows(
    samples: Samples,
    bases: Sequence[str | None],
    per_second: float,
    *heads: str,
    over: str | None = None,
) -> Iterator[Row]:
    """Yield one row per peer: its time, its extra time over ``over``, its ratio to each base.

    A base is None where no peer is left to compare with.
    """
    for name, values in samples.items():
        time = Spread(*(end * per_second for end in spread(values)))
        more = () if over is None else (spread(samples[over]).middle * per_second,)
        yield (
            *(*heads, name, number(time.middle), _range(time)),
            *(number(time.middle - least) for least in more),
            *(with_range(ratio(values, samples[base])) if base else "-" for base in bases),
        )


def _range(value: Spread) -> str:
    return f"{number(value.low)}..{number(value.high)}"


def with_range(value: Spread) -> str:
    """Return a median as text, followed by its spread."""
    return f"{number(value.middle)} ({_range(value)})"


def target(
    name: str, measured: float, limit: float, unit: str = "", *, measurable: bool = True
) -> str:
    """Return the finding that ``measured`` meets or misses ``limit``.

    With ``measurable=False``, a target for GPUs in a run on CPUs, it does neither.
    """
    verdict = "met" if measured <= limit else "missed"
    digits = number if limit >= 0.1 else "{:.4f}".format
    if verdict == "missed" and digits(measured) == digits(limit):
        digits = "{:.4f}".format  # else it would look as if it were met
    if not measurable:
        verdict = NEEDS_GPUS
    return f"{verdict}: {name}: {digits(measured)}{unit}, target at most {digits(limit)}{unit}"


def show(console: Console, report: Report) -> None:
    """Print the table of ``report`` and its findings."""
    table = Table(title=report.name, caption=Text(report.caption), box=box.SIMPLE_HEAD)
    borders = 3 * len(report.columns) + 1
    head, *rows = folded((report.columns, *report.rows), console.width - borders)
    for column in head:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    for finding in report.findings:
        console.print(finding, markup=False, highlight=False, soft_wrap=True)


def write(folder: Path, report: Report, facts: Sequence[Fact], ranks: int) -> Path:
    """Write ``report`` with the machine's ``facts``; the file replaces an earlier one.

    Its name says the benchmark, the ranks and whether they have GPUs. A plot is written next to it
    under the same name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = "cpu" if dict(facts)["GPUs"] == "none" else "gpu"
    path = folder / f"{report.name}-{ranks}{kind}.md"
    plot = path.with_suffix(".png")
    path.write_text(_markdown(report, facts, plot.name))
    if report.plot is not None:
        report.plot(plot)
    return path


def _markdown(report: Report, facts: Sequence[Fact], plot: str) -> str:
    run = [("command", f"`{report.command}`"), *facts]
    parts = [f"# {report.name}", report.caption, "## Run", *_grid(("name", "value"), run)]
    parts += ["## Result", *_grid(report.columns, report.rows)]
    parts += ["## Findings", "\n".join(f"- {finding}" for finding in report.findings)]
    parts += [] if report.plot is None else [f"![{report.name}]({plot})"]
    return "\n\n".join(parts) + "\n"


def _grid(columns: Row, rows: Iterable[Row]) -> Iterator[str]:
    lines = [columns, ("---",) * len(columns), *rows]
    cells = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    yield "\n".join(f"| {line} |" for line in cells)
