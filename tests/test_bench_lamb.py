"""`commlib bench lamb`: in small, and what it makes of its figures."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from commlib.tools.bench import lamb
from commlib.tools.bench.command import run_bench
from commlib.tools.bench.lamb import CAPTURED, OURS, PEER
from commlib.tools.commands import commands

SETTINGS = {"nproc": 2, "rounds": 2, "width": 1024}
MEMORY = {OURS: 625 * 2**20, PEER: 1000 * 2**20}
STATE = {OURS: 375 * 2**20, PEER: 750 * 2**20}


@pytest.mark.usefixtures("warm_launches")
def test_small_on_one_rank(tmp_path: Path) -> None:
    options = ["--nproc", "1", "--width", "4", "--rounds", "1", "--out", str(tmp_path)]

    done = CliRunner().invoke(commands, ["bench", "lamb", *options])

    assert done.exit_code == 0, done.output
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert "`commlib bench lamb --nproc 1 --rounds 1 --width 4`" in text
    assert "the weights after two steps agree" in text
    for call in (OURS, CAPTURED, PEER):
        assert text.count(f"| {call} |") == 1


def test_report() -> None:
    times = {OURS: [0.003], CAPTURED: [0.001], PEER: [0.004]}
    measured = {"times": times, "memory": MEMORY, "state": STATE, "difference": 1e-4}

    report = lamb.report(measured, SETTINGS, "GPUs")

    speed, memory, state, agree = report.findings
    assert speed == f"met: {CAPTURED} / {PEER}: 0.25, target at most 0.50"
    assert memory == "missed: memory / unsharded: 0.62, target at most 0.60"
    assert state == "moments and float32 weights alone, of unsharded: 0.50"
    assert "agree" in agree
    assert {len(row) for row in report.rows} == {len(report.columns)}
    assert [row[-1] for row in report.rows] == ["625", "625", "1000"]
    other = lamb.report({**measured, "difference": 0.5}, {**SETTINGS, "width": 64}, "GPUs")
    assert "DIFFER" in other.findings[-1]
    assert other.findings[0].startswith("not measured here")


def test_bytes_of_flat_buffers() -> None:
    """Padding counts, and memory that tensors share counts once."""
    flat, other = torch.zeros(64), torch.zeros(3, dtype=torch.bfloat16)
    assert lamb.nbytes([flat[:5], flat[8:9], other]) == 64 * 4 + 3 * 2
    param = torch.nn.Parameter(torch.zeros(2))
    assert len(lamb.with_gradients([param])) == 1
    param.grad = torch.zeros(2)
    assert lamb.nbytes(lamb.with_gradients([param])) == 16


def test_parameters_of_bert_large() -> None:
    counts = [rows * (rest[0] if rest else 1) for rows, *rest in lamb.shapes(1024)]
    assert len(counts) == 391
    assert 330e6 < sum(counts) < 340e6


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(("lamb",), None, nproc=0) == 2
    assert "pass --nproc 2" in capsys.readouterr().err
