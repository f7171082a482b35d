"""What has been captured, what it costs, and what stayed eager and why."""

from collections.abc import Iterator
from typing import Any

from commlib.graph.capture import Graphed, everything
from commlib.graph.entry import Entry


def report(graphed: Graphed | None = None) -> list[dict[str, Any]]:
    """Return one dict a captured call, of ``graphed`` or of all there are.

    ``function``, ``key``, ``nodes`` (of its graphs), ``pieces`` (graphs), ``replays``,
    ``bytes_copied`` (by the last replay that copied), ``capture_seconds``, ``collectives`` (in
    order), and ``eager``: why it stayed eager, or None.
    """
    rows = []
    for one in [graphed] if graphed is not None else sorted(everything, key=lambda g: g.name):
        for key, entry in _parts(one):
            pieces = entry.pieces
            rows.append(
                {
                    "function": one.name,
                    "key": key,
                    "nodes": sum(part.nodes for part in pieces.parts),
                    "pieces": len(pieces.ledgers),
                    "replays": entry.replays,
                    "bytes_copied": entry.bytes_copied,
                    "capture_seconds": entry.capture_seconds,
                    "collectives": [str(call) for call in pieces.collectives],
                    "eager": None,
                }
            )
        for key, why in one.eager.items():
            rows.append({"function": one.name, "key": key, "eager": why})
    return rows


def _parts(graphed: Graphed) -> Iterator[tuple[Any, Entry]]:
    for key, entry in graphed.entries.items():
        for part in entry.parts:
            yield key, part
