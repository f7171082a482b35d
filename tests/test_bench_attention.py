"""`commlib bench attention`: in small, and what it makes of its figures on any machine."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from commlib.tools.bench import attention
from commlib.tools.bench.command import run_bench
from commlib.tools.commands import commands

SETTINGS = {"nproc": 2, "rounds": 2, "rows": 4096, "width": 8192}


@pytest.mark.usefixtures("warm_launches")
def test_small_on_one_rank(tmp_path: Path) -> None:
    sizes = ["--rows", "6", "--width", "35", "--rounds", "1", "--out", str(tmp_path)]

    done = CliRunner().invoke(commands, ["bench", "attention", "--nproc", "1", *sizes])

    assert done.exit_code == 0, done.output
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert "6 tokens x 32, 4 heads over 1 ranks, " in text
    assert "`commlib bench attention --nproc 1 --rounds 1 --rows 6 --width 32`" in text
    names = [attention.OURS, attention.OURS_COMPILED, attention.PEER, attention.PEER_COMPILED]
    names += [attention.OVERLAPPED, attention.SEQUENTIAL]
    assert [text.count(f"| {name} |") for name in names] == [1] * 6
    apart = text.split("differ by at most ")[1].split()[0]
    assert float(apart) < (1e-5 if "float32" in text else 5e-2)


def test_report() -> None:
    times = {attention.OURS: [0.008, 0.008], attention.OURS_COMPILED: [0.012, 0.012]}
    times |= {attention.PEER: [0.010, 0.010], attention.PEER_COMPILED: [0.010, 0.010]}
    times |= {attention.OVERLAPPED: [0.003, 0.003], attention.SEQUENTIAL: [0.004, 0.004]}

    report = attention.report({"times": times, "apart": 1e-3}, SETTINGS, "nccl")

    assert "4096 tokens x 8192, 64 heads over 2 ranks, bfloat16" in report.caption
    assert "torch.compile (inductor)" in report.caption
    assert {len(row) for row in report.rows} == {len(report.columns)}
    assert report.rows[0][:2] == (attention.OURS, "8.00")
    eager, mixed, compiled, overlap, apart = report.findings
    assert eager.startswith(f"met: {attention.OURS} / {attention.PEER}: 0.80, target at most 0.90")
    assert mixed.startswith(f"met: {attention.OURS} / {attention.PEER_COMPILED}: 0.80, ")
    assert overlap.startswith(f"met: {attention.OVERLAPPED} / ") and ": 0.75," in overlap
    assert compiled.startswith(f"missed: {attention.OURS_COMPILED} / ") and ": 1.20," in compiled
    assert apart.endswith("at most 0.001 of the peer's")


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(("attention",), None, nproc=0) == 2
    assert run_bench(("attention",), None, classes=5) == 2
    said = capsys.readouterr().err
    assert "pass --nproc 2" in said and "attention has no option 'classes'" in said
