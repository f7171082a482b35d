"""Comparison of the demo's runs: which results have equal bits, and which must have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.tools.demo.runs import MODES, Mode, Report
from commlib.tools.demo.truth import FORMULAS

REFERENCE = MODES[0]
FORMULA = "the formula"

# A fusing compiler contracts a*b+c and reorders sums inside a kernel. Single precision then differs
# in the last bits (6e-8 of a value near 1), and the training steps accumulate the differences.
COMPILER_TOLERANCE = 1e-4

Array = npt.NDArray[Any]
Reports = Mapping[Mode, Report]


@dataclass(frozen=True)
class Cell:
    """One result of one run, compared with another."""

    against: str
    equal: bool
    difference: float | None  # None: not comparable (other shapes, or not finite)
    limit: float = 0.0

    @property
    def good(self) -> bool:
        """True if the bits are equal or the compiler may cause the difference."""
        return self.equal or (self.difference is not None and 0 < self.difference <= self.limit)


@dataclass
class Row:
    """One operator or training series: one cell per run, and the failures."""

    name: str
    cells: dict[str, Cell] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, mode: Mode, result: Array, base: Array, cell: Cell) -> None:
        """Add a cell; if it is not good, also add a failure that names the first difference."""
        self.cells[mode.label] = cell
        if not cell.good:
            difference = _difference(result, base)
            self.failures.append(f"{self.name}, {mode.label} against {cell.against}: {difference}")


def compare(reports: Reports, backend: str) -> list[Row]:
    """Return one row per result; a row with failures breaks the promise of equal bits."""
    engines = Row("engine", failures=_wrong_engines(reports, backend))
    operators = [_operator(name, reports) for name in FORMULAS]
    series = [_series(name, reports) for name in reports[REFERENCE]["training"]]
    return [engines, *operators, *series]


def _wrong_engines(reports: Reports, backend: str) -> list[str]:
    """Return a failure per run on an unexpected engine: its comparison would prove nothing."""
    expected = {mode: backend if mode.unified else "c10d" for mode in reports}
    return [
        f"{mode.label}: ran on engine {report['engine']}, expected {expected[mode]}"
        for mode, report in reports.items()
        if report["engine"] != expected[mode]
    ]


def _operator(name: str, reports: Reports) -> Row:
    """Compare the reference run with the formula, and every other run with the reference."""
    row = Row(name)
    reference = _record(reports[REFERENCE], name)
    for mode, report in reports.items():
        if mode == REFERENCE:
            formula = FORMULAS[name](_record(report, "input"))
            row.add(mode, reference, formula, _cell(FORMULA, reference, formula))
        else:
            result = _record(report, name)
            row.add(mode, result, reference, _cell(REFERENCE.label, result, reference))
    return row


def _series(name: str, reports: Reports) -> Row:
    """Compare flag on with flag off in the same mode, and compiled with eager with flag off."""
    row = Row(name)
    for mode, report in reports.items():
        other = Mode(unified=False, compiled=mode.compiled and mode.unified)
        limit = COMPILER_TOLERANCE if mode.compiled != other.compiled else 0.0
        result, base = _numbers(report, name), _numbers(reports[other], name)
        row.add(mode, result, base, _cell(other.label, result, base, limit))
    return row


def _record(report: Report, name: str) -> Array:
    """Return an operator's results, the ranks along the first axis; empty if it is missing."""
    record = report["operators"].get(name, {"values": [], "shape": [0], "dtype": "float32"})
    values = [float.fromhex(value) for value in record["values"]]
    return np.array(values, dtype=record["dtype"]).reshape(record["shape"])


def _numbers(report: Report, name: str) -> Array:
    return np.array([float.fromhex(value) for value in report["training"].get(name, [])])


def _cell(against: str, result: Array, base: Array, limit: float = 0.0) -> Cell:
    alike = result.shape == base.shape and result.dtype == base.dtype and result.size > 0
    if not alike or not np.isfinite(result).all() or not np.isfinite(base).all():
        return Cell(against, False, None, limit)
    # Bits, not numbers: 0.0 and -0.0 are equal numbers.
    equal = np.ascontiguousarray(result).tobytes() == np.ascontiguousarray(base).tobytes()
    return Cell(against, equal, float(np.abs(result - base).max()), limit)


def _difference(result: Array, base: Array) -> str:
    """Describe the first difference of two results."""
    if result.size == 0:
        return "missing"
    if result.shape != base.shape or result.dtype != base.dtype:
        actual = f"{result.dtype} of shape {result.shape}"
        return f"{actual}, expected {base.dtype} of shape {base.shape}"
    differs = (result != base) | (np.signbit(result) != np.signbit(base)) | ~np.isfinite(result)
    first = tuple(int(axis[0]) for axis in np.nonzero(differs)) if differs.any() else (0,)
    values = f"{result[first]}, expected {base[first]}"
    return f"{differs.sum()} of {result.size} differ, first at {first}: {values}"
