"""Tables of a report: rows as dicts, shown as text or HTML."""

import html as escape
from collections.abc import Callable, Iterable, Mapping
from textwrap import shorten
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
Columns: TypeAlias = Mapping[str, str]  # title of a column -> key of a row

_WIDEST = 100  # characters of a cell; the row itself has the whole text


def text_table(columns: Columns, rows: Iterable[Row]) -> str:
    """Return a table with one line per row below a line of titles."""
    lines = [tuple(columns), *(_cells(columns, row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def html_table(
    columns: Columns, rows: Iterable[Row], details: Callable[[Row], str] | None = None
) -> str:
    """Return an HTML table; ``details`` returns the HTML that follows a row in its own line."""
    head = "".join(f"<th>{escape.escape(name)}</th>" for name in columns)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{escape.escape(cell)}</td>" for cell in _cells(columns, row))
        body += f"<tr>{cells}</tr>"
        if details is not None:
            body += f'<tr><td colspan="{len(columns)}">{details(row)}</td></tr>'
    return f"<table><tr>{head}</tr>{body}</table>"


def _cells(columns: Columns, row: Row) -> tuple[str, ...]:
    return tuple(_cell(row.get(name)) for name in columns.values())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return str(len(value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_cell(each)}" for key, each in value.items())
    return f"{value:.3f}" if isinstance(value, float) else shorten(str(value), _WIDEST)
