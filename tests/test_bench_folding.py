"""Cells of the tables of ``commlib bench`` in a narrow terminal."""

import io

import pytest
from rich.console import Console

from commlib.tools.bench.folding import fold, folded
from commlib.tools.bench.report import Report, show

COLUMNS = ("size", "call", "median µs", "ratio to dist.all_reduce(x) (p10..p90)")
ROWS = (
    ("512 KiB", "ops.all_reduce(x, out=x)", "12345.678", "1.09 (0.95..1.24)"),
    ("512 KiB", "dist.all_reduce(x.clone())", "0.500", "1.00 (1.00..1.00)"),
)


@pytest.mark.parametrize(
    ("cell", "width", "lines"),
    [
        ("ops.all_reduce(x, out=x)", 24, ["ops.all_reduce(x, out=x)"]),
        ("ops.all_reduce(x, out=x)", 17, ["ops.all_reduce(x,", "out=x)"]),
        ("ops.all_reduce(x, out=x)", 9, ["ops.all_", "reduce(x,", "out=x)"]),
        ("dist.all_reduce(x.clone())", 11, ["dist.all_", "reduce(x.", "clone())"]),
        ("1.09 (0.95..1.24)", 7, ["1.09", "(0.95..", "1.24)"]),
        ("x.clone())", 7, ["x.", "clone())"]),
        ("bucketed", 4, ["bucketed"]),
        ("", 4, [""]),
    ],
)
def test_a_cell_folds_at_spaces_and_punctuation(cell: str, width: int, lines: list[str]) -> None:
    assert fold(cell, width).split("\n") == lines


def test_cells_that_fit_are_not_folded() -> None:
    assert list(folded((COLUMNS, *ROWS), 200)) == [*map(list, (COLUMNS, *ROWS))]


def test_no_word_of_a_narrow_table_is_cut() -> None:
    shown = io.StringIO()

    show(Console(file=shown, width=48), Report("x", "", COLUMNS, ROWS, (), {}))

    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= 48
    pieces = ("dist.all_", "reduce(x.", "clone())", "reduce(x,", "(0.95..", "1.24)", "12345.678")
    assert not [piece for piece in pieces if piece not in text.split()]
