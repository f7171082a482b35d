"""The report of captured calls, their costs, and eager calls with reasons: rows, table, page."""

import html as escape
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from commlib.errors import GraphError
from commlib.graph.backends.graph_memory import usage
from commlib.graph.captured_function import CapturedFunction, everything
from commlib.graph.compiled.region import Region, regions
from commlib.graph.drift import drift_over
from commlib.graph.pipelines.pipeline import Pipeline
from commlib.graph.replaying.captured_call import CapturedCall
from commlib.graph.tables import Row, html_table, text_table

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

_MEMORY = {
    "device": "device",
    "allocator": "allocator",
    "graphs' bytes": "graph_bytes",
    "total bytes": "total_bytes",
}
_DRIFT = {
    "function": "function",
    "replays": "replays",
    "replay µs by rank": "replay_us",
    "spread µs": "spread_us",
    "worst": "worst_spread_us",
    "slowest rank": "slowest_rank",
    "late µs": "late_us",
    "worst late": "worst_late_us",
    "latest rank": "latest_rank",
}
_NO_TIMES = "no replay was timed: set FLAGS_graph_drift=100 before functions are captured"


class Report(list[Row]):
    """Rows, one per captured call; ``print`` and notebooks show tables.

    Attributes:
        memory: One row per device with graphs.
        drift: One row per function whose ranks were compared; None without a comparison.
    """

    def __init__(self, rows: Iterable[Row], drift: list[Row] | None) -> None:
        super().__init__(rows)
        self.memory, self.drift = _memory(self), drift

    def __str__(self) -> str:
        tables = [text_table(_COLUMNS, self)]
        if self.memory:
            tables.append(text_table(_MEMORY, self.memory))
        if self.drift is not None:
            tables.append(text_table(_DRIFT, self.drift) if self.drift else _NO_TIMES)
        return "\n\n".join(tables)

    def _repr_html_(self) -> str:
        """Return the tables as a notebook shows them."""
        tables = html_table(_COLUMNS, self, _details) + html_table(_MEMORY, self.memory)
        if self.drift is not None:
            tables += html_table(_DRIFT, self.drift) if self.drift else f"<p>{_NO_TIMES}</p>"
        return tables

    def page(self) -> str:
        """Return an HTML page with the tables, and the key and collectives of each call."""
        style = "body{font:14px sans-serif}td,th{padding:2px 10px;text-align:left}"
        return (
            f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Graphs</title>'
            f"<style>{style}</style></head><body><h1>Graphs</h1>{self._repr_html_()}</body></html>\n"
        )


def report(
    graphed: CapturedFunction | Region | Pipeline | None = None,
    *,
    html: str | Path | None = None,
    drift: int | None = None,
) -> Report:
    """Return one row per captured call; ``print`` shows tables.

    ``drift`` compares when the ranks of a ring began the same replays, and how long these took.
    Only functions with collectives that were captured with ``FLAGS_graph_drift`` above 0 are timed:
    by events around each replay on a GPU, by the host clock on a CPU. A replay includes the time
    that it waits in its collectives, so a rank that begins late has short replays.

    Args:
        graphed: The captured function, pipeline or result of ``backend.apply`` to report. None
            reports all, compiled models too.
        html: A file for the same report as an HTML page.
        drift: The number of a ring whose members compare their replays. Every member calls
            ``report`` with it, after the same calls. The host then waits for these replays, and for
            the other members, each at most the ring's timeout.

    Returns:
        A list of dicts. A call that stayed eager has ``function``, ``key`` and ``eager`` only. An
        operator of compiled code that runs eagerly between graphs has these too.

        * ``function``, ``key``: the function's name and the cache key.
        * ``device``: where the graphs run.
        * ``segments``, ``nodes``: the number of graphs, and their nodes in total.
        * ``replays``, ``bytes_copied``: the number of replays, and the bytes the last one copied.
        * ``pool_bytes``: the growth of torch's GPU memory during the capture, by any thread; under
          ``cudaMallocAsync`` the most bytes that the allocations of a graph hold at once.
        * ``capture_seconds``, ``verify_seconds``: the cost of the capture and of all comparisons.
        * ``verified``: the calls and backwards that were compared with the function.
        * ``repeats``: False if runs of the function differ in bits. All items of a kind that
          differs (outputs, gradients, memory, one name) are compared by half of their digits, or
          by ``tolerance=``.
        * ``captured_variant``: True if the function queries whether it is captured and reads
          values if not. The query then returns True, and the last digits may differ.
        * ``launch_us``: the host time of one replay.
        * ``eager_us``: the host time of the function and its backward at the last verification;
          None before the first.
        * ``collectives``: the collectives in order.
        * ``eager``: the reason why the call stayed eager, or None.

        ``memory`` has a row per device of these calls: ``device``, ``allocator``, ``graph_bytes``
        (what torch's private pools hold; under ``cudaMallocAsync`` what the driver reserves for
        graphs), and ``total_bytes`` (what torch's allocator and graphs have taken from it).

        ``drift`` has a row per function, and one for its backward. The last replays on each rank
        are compared one by one. The rows are the same on all members:

        * ``replays``: how many were compared; at most ``FLAGS_graph_drift``.
        * ``replay_us``: by rank, the median length of a replay.
        * ``spread_us``, ``worst_spread_us``: the difference between the longest and the shortest
          length of the same replay on the ranks; median and maximum over replays.
        * ``slowest_rank``: the rank with the largest median length.
        * ``late_us``, ``worst_late_us``: the time between the first and the last rank's beginning
          of the same replay; median and maximum. Clocks of GPUs are read by an event that the host
          waits for (some 10 µs). Processes of one host have one clock; clocks of several hosts are
          compared by exchanges, which is exact to about the time of one exchange.
        * ``latest_rank``: the rank that began last most often, for which the others waited.

    Raises:
        GraphError: ``drift`` is not a number, or ``graphed`` has no graphs.
        RingError: There is no such ring here.
        CommTimeout: Members of the ring have not called ``report`` in time, or replays have not
            ended.
    """
    selected, compiled = _selected(graphed)
    compared = None if drift is None else drift_over(drift, selected)
    selected = sorted(selected, key=lambda one: one.name)
    rows = [row for one in selected for row in (*_captured(one), *_eager(one))]
    rows += (row for one in sorted(compiled, key=lambda one: one.name) for row in _cuts(one))
    result = Report(rows, compared)
    if html is not None:
        Path(html).write_text(result.page())
    return result


def _selected(graphed: Any) -> tuple[list[CapturedFunction[..., Any]], list[Region]]:
    """Return the captured functions, and the regions of compiled code, that a report is about."""
    if graphed is None:
        return [*everything], [*regions]
    if isinstance(graphed, CapturedFunction):
        return [graphed], []
    if isinstance(graphed, Region):
        return graphed.captured, [graphed]
    if isinstance(graphed, Pipeline):
        return [*graphed.captured, *graphed.uncaptured], []
    raise GraphError(
        f"report({type(graphed).__name__}): expected what graph.capture, graph.pipeline or "
        f"graph.backend.apply returns; call report() for all, compiled models too"
    )


def _captured(one: CapturedFunction) -> Iterator[Row]:
    for key, entry in _parts(one):
        graphs = entry.graphs
        parts = [part for segments in graphs for part in segments.parts]
        yield {
            "function": one.name,
            "key": key,
            "device": str(entry.segments.device),
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
    for key, entry in [*one.entries.items()]:  # other threads may capture, and release
        for part in entry.parts:
            yield key, part


def _eager(one: CapturedFunction) -> Iterator[Row]:
    for key, reason in [*one.eager.items()]:
        yield {"function": one.name, "key": key, "eager": reason}


def _cuts(one: Region) -> Iterator[Row]:
    for name, reason in one.cuts:
        yield {"function": name, "key": None, "eager": reason}


def _details(row: Row) -> str:
    calls = "".join(f"<li>{escape.escape(call)}</li>" for call in row.get("collectives", []))
    key = escape.escape(repr(row["key"]))
    return f"<details><summary>key and collectives</summary><p>{key}</p><ol>{calls}</ol></details>"


def _memory(rows: Iterable[Row]) -> list[Row]:
    """Return what graphs hold per device, from the rows of captured calls."""
    captured: dict[str, int] = {}
    for row in rows:
        if "device" in row:
            captured[row["device"]] = captured.get(row["device"], 0) + row["pool_bytes"]
    return [usage(torch.device(name), nbytes) for name, nbytes in sorted(captured.items())]
