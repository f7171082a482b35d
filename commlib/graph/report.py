"""The report of captured calls, their costs, and eager calls with reasons: rows, table, page."""

import html as escape
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

from commlib.graph.captured_function import CapturedFunction, everything
from commlib.graph.compiled.region import Region, regions
from commlib.graph.replaying.captured_call import CapturedCall

_COLUMNS = {  # column of the table -> key of a row
    "function": "function",
    "graphs": "segments",
    "nodes": "nodes",
    "replays": "replays",
    "bytes copied": "bytes_copied",
    "pool bytes": "pool_bytes",
    "capture s": "capture_seconds",
    "verified": "verified",
    "verify s": "verify_seconds",
    "launch µs": "launch_us",
    "eager µs": "eager_us",
    "collectives": "collectives",
    "eager because": "eager",
}


_WIDEST = 100  # characters of a cell; the row itself has the whole text


class Report(list[dict[str, Any]]):
    """Rows, one per captured call; ``print`` shows a table."""

    def __str__(self) -> str:
        lines = [tuple(_COLUMNS), *(_cells(row) for row in self)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def page(self) -> str:
        """Return an HTML page with the table, and the key and collectives of each call."""
        head = "".join(f"<th>{escape.escape(name)}</th>" for name in _COLUMNS)
        body = "".join(map(_html, self))
        style = "body{font:14px sans-serif}td,th{padding:2px 10px;text-align:left}"
        return (
            f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Graphs</title>'
            f"<style>{style}</style></head><body><h1>Graphs</h1>"
            f"<table><tr>{head}</tr>{body}</table></body></html>\n"
        )


def report(
    graphed: CapturedFunction | Region | None = None, *, html: str | Path | None = None
) -> Report:
    """Return one row per captured call; ``print`` shows them as a table.

    Args:
        graphed: The captured function, or result of ``backend.apply``, to report; None reports all.
        html: A file for the same report as an HTML page.

    Returns:
        A list of dicts. A call that stayed eager has ``function``, ``key`` and ``eager`` only. An
        operator of compiled code that runs eagerly between graphs has these too.

        * ``function``, ``key``: the function's name and the cache key.
        * ``segments``, ``nodes``: the number of graphs, and their nodes in total.
        * ``replays``, ``bytes_copied``: the number of replays, and the bytes the last one copied.
        * ``pool_bytes``: the growth of torch's GPU memory during the capture, by any thread.
        * ``capture_seconds``, ``verify_seconds``: the cost of the capture and of all comparisons.
        * ``verified``: the calls and backwards that were compared with the function.
        * ``repeats``: False if runs of the function differ in bits. The differing items are
          compared by half of their digits, or by ``tolerance=``.
        * ``captured_variant``: True if the function queries whether it is captured and reads
          values if not. The query then returns True, and the last digits may differ.
        * ``launch_us``: the host time of one replay.
        * ``eager_us``: the host time of the function and its backward at the last verification;
          None before the first.
        * ``collectives``: the collectives in order.
        * ``eager``: the reason why the call stayed eager, or None.
    """
    compiled = [graphed] if isinstance(graphed, Region) else [] if graphed else [*regions]
    if isinstance(graphed, CapturedFunction):
        selected = [graphed]
    else:
        selected = [*everything] if graphed is None else graphed.captured
    rows = Report(
        row
        for one in sorted(selected, key=lambda one: one.name)
        for row in (*_captured(one), *_eager(one))
    )
    rows += (row for one in sorted(compiled, key=lambda one: one.name) for row in _cuts(one))
    if html is not None:
        Path(html).write_text(rows.page())
    return rows


def _captured(one: CapturedFunction) -> Iterator[dict[str, Any]]:
    for key, entry in _parts(one):
        graphs = entry.graphs
        parts = [part for segments in graphs for part in segments.parts]
        yield {
            "function": one.name,
            "key": key,
            "nodes": sum(part.nodes for part in parts),
            "segments": sum(len(segments.recorders) for segments in graphs),
            "replays": entry.replays,
            "bytes_copied": entry.bytes_copied,
            "pool_bytes": sum(part.nbytes for part in parts),
            "capture_seconds": entry.capture_seconds,
            "verified": entry.log.verified,
            "verify_seconds": entry.log.seconds,
            "repeats": not entry.log.noise,
            "captured_variant": entry.segments.reports_capture,
            "launch_us": _microseconds(entry.launch_seconds),
            "eager_us": _microseconds(entry.log.eager_seconds),
            "collectives": [str(call) for segments in graphs for call in segments.collectives],
            "eager": None,
        }


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def _parts(one: CapturedFunction) -> Iterator[tuple[Any, CapturedCall]]:
    for key, entry in one.entries.items():
        for part in entry.parts:
            yield key, part


def _eager(one: CapturedFunction) -> Iterator[dict[str, Any]]:
    for key, reason in one.eager.items():
        yield {"function": one.name, "key": key, "eager": reason}


def _cuts(one: Region) -> Iterator[dict[str, Any]]:
    for name, reason in one.cuts:
        yield {"function": name, "key": None, "eager": reason}


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(_cell(row.get(name)) for name in _COLUMNS.values())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return str(len(value))
    return f"{value:.3f}" if isinstance(value, float) else shorten(str(value), _WIDEST)


def _html(row: dict[str, Any]) -> str:
    cells = "".join(f"<td>{escape.escape(cell)}</td>" for cell in _cells(row))
    calls = "".join(f"<li>{escape.escape(call)}</li>" for call in row.get("collectives", []))
    key = escape.escape(repr(row["key"]))
    more = f"<details><summary>key and collectives</summary><p>{key}</p><ol>{calls}</ol></details>"
    return f'<tr>{cells}</tr><tr><td colspan="{len(_COLUMNS)}">{more}</td></tr>'
