"""The plot of a benchmark: time over size, a line a peer, as a PNG file."""

from collections.abc import Mapping
from itertools import chain, cycle, product
from pathlib import Path
from typing import Any

from commlib.tools.bench.rounds import HIGHEST, LOWEST, Samples, spread

UNITS = ((2**20, "MiB"), (2**10, "KiB"), (1, "B"))
OURS: dict[str, Any] = {"color": "black", "linewidth": 3, "marker": "o", "zorder": 3}
THEIRS = [  # no two of 30 peers look alike
    {"color": f"C{color}", "linestyle": dashes, "marker": marker}
    for (dashes, marker), color in product([("-", "o"), ("--", "s"), (":", "^")], range(10))
]


def size_label(nbytes: int) -> str:
    """Write a number of bytes in the largest unit that holds it whole."""
    unit, name = next((unit, name) for unit, name in UNITS if nbytes % unit == 0)
    return f"{nbytes // unit} {name}"


def draw(path: Path, title: str, sizes: Mapping[int, Samples]) -> None:
    """Draw the median seconds of every peer at every size (bytes), as µs, with their spread.

    The first peer is commlib's.
    """
    # Only a run that writes files waits for this import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = dict.fromkeys(name for samples in sizes.values() for name in samples)
    for name, style in zip(names, chain([OURS], cycle(THEIRS)), strict=False):
        measured = [nbytes for nbytes, samples in sizes.items() if name in samples]
        times = [spread(sizes[nbytes][name]) for nbytes in measured]
        middle = [time.middle * 1e6 for time in times]
        low, high = [time.low * 1e6 for time in times], [time.high * 1e6 for time in times]
        label = f"commlib: {name}" if style is OURS else name
        (line,) = axes.plot(measured, middle, markersize=4, label=label, **style)
        axes.fill_between(measured, low, high, alpha=0.25, color=line.get_color(), linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(sizes), [size_label(nbytes) for nbytes in sizes], rotation=45)
    axes.set(title=title, xlabel="size", ylabel=f"µs a call, median and p{LOWEST}..p{HIGHEST}")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
