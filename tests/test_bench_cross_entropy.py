"""`commlib bench cross-entropy`: in small, and what it makes of its figures on any machine."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from commlib.tools.bench import cross_entropy
from commlib.tools.bench.command import run_bench
from commlib.tools.commands import commands

OURS, PEER = "ops.softmax_with_cross_entropy", "composition"
SETTINGS = {"nproc": 2, "rounds": 2, "rows": 4, "classes": 6, "dtype": "float32"}


@pytest.mark.parametrize(("nproc", "dtype"), [("1", "float16")])
@pytest.mark.usefixtures("warm_launches")
def test_small(nproc: str, dtype: str, tmp_path: Path) -> None:
    sizes = ["--rows", "5", "--classes", "31", "--dtype", dtype, "--rounds", "2"]

    done = CliRunner().invoke(
        commands, ["bench", "cross-entropy", "--nproc", nproc, *sizes, "--out", str(tmp_path)]
    )

    assert done.exit_code == 0, done.output
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert f"5 rows x 31 classes over {nproc} ranks, {dtype}" in text
    assert f"`commlib bench cross-entropy --nproc {nproc} --rounds 2 --rows 5" in text
    assert text.count(f"| {OURS} |") == text.count(f"| {PEER} |") == 1
    apart = text.split("differ by at most ")[1].split()[0]
    assert float(apart) < (1e-6 if dtype == "float32" else 5e-3)


def test_report_with_memory() -> None:
    measured = {
        "times": {OURS: [0.001, 0.001], PEER: [0.004, 0.004]},
        "peaks": {OURS: [2**20, 2**20], PEER: [2**22, 2**22]},
        "apart": 1e-7,
    }

    report = cross_entropy.report(measured, SETTINGS)

    ours, peer = report.rows
    assert len(ours) == len(peer) == len(report.columns)
    assert ours[:2] == (OURS, "1.00") and ours[-3:] == ("0.25 (0.25..0.25)", "1.00", "0.25")
    assert peer[:2] == (PEER, "4.00") and peer[-2:] == ("4.00", "1.00")
    time, memory, apart = report.findings
    assert time == f"met: time, {OURS} / {PEER}: 0.25, target at most 0.70"
    assert memory == f"met: peak memory, {OURS} / {PEER}: 0.25, target at most 0.60"
    assert apart.endswith("at most 1e-07 of the peer's")
    assert "on GPUs" in report.caption


def test_report_without_memory() -> None:
    measured = {"times": {OURS: [0.8], PEER: [1.0]}, "peaks": {}, "apart": 0.0}

    report = cross_entropy.report(measured, SETTINGS)

    assert {row[-2:] for row in report.rows} == {("not available", "not available")}
    assert report.findings[0].startswith("not measured here, needs GPUs: time, ")
    assert len(report.findings) == 2
    assert "on CPUs" in report.caption


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(("cross-entropy",), None, nproc=0) == 2
    assert run_bench(("gloo",), None, rows=5) == 2
    said = capsys.readouterr().err
    assert "pass --nproc 2" in said and "gloo has no option 'rows'; remove --rows" in said
