"""Folding of a table's cells at spaces, and at punctuation inside long words."""

import re
from collections.abc import Iterator, Sequence

_WORDS = re.compile(r"(?<= )")
_PIECES = re.compile(r"(?<= )|(?<=\.\.)|(?<=\w[(,=_/])(?![ )])|(?<=\w\.)(?=[a-z])")


def folded(rows: Sequence[Sequence[str]], width: int) -> Iterator[list[str]]:
    """Yield the rows of a table with the line breaks that its cells need.

    Args:
        rows: The head of the table and its rows.
        width: Characters of all columns together. Words without punctuation may need more.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [
        max(len(one.rstrip()) for cell in column for one in _PIECES.split(cell))
        for column in columns
    ]
    while sum(widths) > width and widths != least:
        loose = [at for at, limit in enumerate(least) if widths[at] > limit]
        widths[max(loose, key=widths.__getitem__)] -= 1
    for row in rows:
        yield [fold(cell, limit) for cell, limit in zip(row, widths, strict=True)]


def fold(cell: str, width: int) -> str:
    """Return a cell in lines of ``width`` characters; a piece that is longer has its own line."""
    lines = [""]
    for word in _WORDS.split(cell):
        for piece in [word] if len(word.rstrip()) <= width else _PIECES.split(word):
            if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)
