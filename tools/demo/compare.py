"""The demo's verdict: which results of its runs have the same bits, and which must."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.tools.demo.runs import MODES, Mode, Report
from commlib.tools.demo.truth import FORMULAS

REFERENCE = MODES[0]
FORMULA = "the formula"

# A fusing compiler contracts a*b+c and reorders sums inside a kernel: single precision then differs
# in the last bits (6e-8 of a value near 1), and each training step carries that on.
COMPILER_TOLERANCE = 1e-4

Array = npt.NDArray[Any]
Reports = Mapping[Mode, Report]


@dataclass(frozen=True)
class Cell:
    """One result of one run, held against another."""

    against: str
    equal: bool
    difference: float | None  # None: not comparable (other shapes, or not finite)
    limit: float = 0.0

    @property
    def good(self) -> bool:
        """Whether the bits are equal, or the difference is one that the compiler may make."""
        return self.equal or (self.difference is not None and 0 < self.difference <= self.limit)


@dataclass
class Row:
    """One operator or one series of the training: a cell a run, and what is wrong with them."""

    name: str
    cells: dict[str, Cell] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, mode: Mode, found: Array, base: Array, cell: Cell) -> None:
        """Keep a cell; if it is not good, say where the two results part."""
        self.cells[mode.label] = cell
        if not cell.good:
            where = _where(found, base)
            self.failures.append(f"{self.name}, {mode.label} against {cell.against}: {where}")


def compare(reports: Reports, backend: str) -> list[Row]:
    """Return one row a result; rows that hold failures break the promise of equal bits."""
    engines = Row("engine", failures=_wrong_engines(reports, backend))
    operators = [_operator(name, reports) for name in FORMULAS]
    series = [_series(name, reports) for name in reports[REFERENCE]["training"]]
    return [engines, *operators, *series]


def _wrong_engines(reports: Reports, backend: str) -> list[str]:
    """Make sure that the flag did choose another engine: else the comparison says nothing."""
    expected = {mode: backend if mode.unified else "c10d" for mode in reports}
    return [
        f"{mode.label}: ran on engine {report['engine']}, expected {expected[mode]}"
        for mode, report in reports.items()
        if report["engine"] != expected[mode]
    ]


def _operator(name: str, reports: Reports) -> Row:
    """Hold the reference run against the formula, and every other run against the reference."""
    row = Row(name)
    base = _record(reports[REFERENCE], name)
    for mode, report in reports.items():
        if mode == REFERENCE:
            found, other = base, FORMULAS[name](_record(report, "input"))
            row.add(mode, found, other, _cell(FORMULA, found, other))
        else:
            found, other = _record(report, name), base
            row.add(mode, found, other, _cell(REFERENCE.label, found, other))
    return row


def _series(name: str, reports: Reports) -> Row:
    """Hold flag on against flag off in the same mode, and compiled against eager with flag off."""
    row = Row(name)
    for mode, report in reports.items():
        other = Mode(unified=False, compiled=mode.compiled and mode.unified)
        limit = COMPILER_TOLERANCE if mode.compiled != other.compiled else 0.0
        found, base = _numbers(report, name), _numbers(reports[other], name)
        row.add(mode, found, base, _cell(other.label, found, base, limit))
    return row


def _record(report: Report, name: str) -> Array:
    """Return an operator's results, the ranks along the first axis; empty if it is missing."""
    record = report["operators"].get(name, {"values": [], "shape": [0], "dtype": "float32"})
    values = [float.fromhex(value) for value in record["values"]]
    return np.array(values, dtype=record["dtype"]).reshape(record["shape"])


def _numbers(report: Report, name: str) -> Array:
    return np.array([float.fromhex(value) for value in report["training"].get(name, [])])


def _cell(against: str, found: Array, base: Array, limit: float = 0.0) -> Cell:
    alike = found.shape == base.shape and found.dtype == base.dtype and found.size > 0
    if not alike or not np.isfinite(found).all() or not np.isfinite(base).all():
        return Cell(against, False, None, limit)
    # Bits, not numbers: 0.0 and -0.0 are equal numbers.
    same = np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(base).tobytes()
    return Cell(against, same, float(np.abs(found - base).max()), limit)


def _where(found: Array, base: Array) -> str:
    """Say in words what differs first."""
    if found.size == 0:
        return "missing"
    if found.shape != base.shape or found.dtype != base.dtype:
        return f"{found.dtype} of shape {found.shape}, expected {base.dtype} of shape {base.shape}"
    differs = (found != base) | (np.signbit(found) != np.signbit(base)) | ~np.isfinite(found)
    first = tuple(int(axis[0]) for axis in np.nonzero(differs)) if differs.any() else (0,)
    parts = f"{found[first]}, expected {base[first]}"
    return f"{differs.sum()} of {found.size} differ, first at {first}: {parts}"
