"""`commlib bench class-center`: in small, and what it makes of its figures."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from commlib.tools.bench import class_center
from commlib.tools.bench.command import run_bench
from commlib.tools.commands import commands

OURS, LEGACY, SORT = "ops.class_center_sample", "legacy algorithm", "torch.sort alone"
SETTINGS = {"nproc": 2, "rounds": 2, "rows": 9, "classes": 60}


@pytest.mark.parametrize("nproc", ["1"])
@pytest.mark.usefixtures("warm_launches")
def test_small(nproc: str, tmp_path: Path) -> None:
    sizes = ["--rows", "5", "--classes", "100", "--rounds", "2"]

    done = CliRunner().invoke(
        commands, ["bench", "class-center", "--nproc", nproc, *sizes, "--out", str(tmp_path)]
    )

    assert done.exit_code == 0, done.output
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert f"5 int64 labels, 100 classes over {nproc} ranks" in text
    assert f"`commlib bench class-center --nproc {nproc} --rounds 2 --rows 5 --classes" in text
    assert "remapped labels of all calls are equal" in text
    for call in (OURS, f"{OURS}, padded", LEGACY, SORT):
        assert text.count(f"| {call} |") == 1


def test_report() -> None:
    times = {OURS: [0.001], f"{OURS}, padded": [0.001], LEGACY: [0.004], SORT: [0.0016]}

    report = class_center.report({"times": times, "equal": True}, SETTINGS, "GPUs")

    overall, alone, equal = report.findings
    assert overall == f"met: {OURS} / {LEGACY}: 0.25, target at most 0.50"
    assert alone == f"missed: {OURS} / {SORT}: 0.62, target at most 0.50"
    assert equal.endswith("are equal")
    assert {len(row) for row in report.rows} == {len(report.columns)}
    unlike = class_center.report({"times": times, "equal": False}, SETTINGS, "GPUs")
    assert unlike.findings[-1].endswith("DIFFER")


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(("class-center",), None, nproc=0) == 2
    assert run_bench(("class-center",), None, dtype="float32") == 2
    said = capsys.readouterr().err
    assert "pass --nproc 2" in said and "no option 'dtype'" in said
