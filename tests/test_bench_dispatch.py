"""`commlib bench dispatch`: what it makes of its figures."""

import pytest

from commlib.tools.bench import dispatch
from commlib.tools.bench.command import run_bench

THERE = {
    dispatch.OURS: [2e-5],
    dispatch.FP8: [1e-5],
    dispatch.BARE: [8e-6],
    dispatch.PEER: [4e-5],
}
BACK = {dispatch.OURS: [3e-5], dispatch.BARE: [2e-5], dispatch.PEER: [4e-5]}
WAYS = {dispatch.DISPATCH: THERE, dispatch.COMBINE: BACK}


def test_report() -> None:
    """Each way has its limits; that of packed messages depends on the number of tokens."""
    found = {"128": WAYS, "4096": WAYS}

    report = dispatch.report(found, {"nproc": 4, "rounds": 1}, "nccl")

    ends = [(line.split(" / ")[0], line.rsplit(": ")[-1]) for line in report.findings]
    assert ends == [
        ("missed: 128 tokens: expert_dispatch", "2.50, target at most 2.00"),
        ("met: 128 tokens: expert_dispatch", "0.50, target at most 0.50"),
        ("met: 128 tokens: expert_combine", "1.50, target at most 2.00"),
        ("missed: 128 tokens: expert_combine", "0.75, target at most 0.50"),
        ("missed: 4096 tokens: expert_dispatch", "2.50, target at most 2.00"),
        ("met: 4096 tokens: expert_dispatch", "0.50, target at most 0.80"),
        ("met: 4096 tokens: expert_combine", "1.50, target at most 2.00"),
        ("met: 4096 tokens: expert_combine", "0.75, target at most 0.80"),
    ]
    assert "7168 on each of 4 ranks, 8 random experts of 64" in report.caption
    assert {len(row) for row in report.rows} == {len(report.columns)}
    on_cpus = dispatch.report(found, {"nproc": 2, "rounds": 1}, "gloo")
    assert all(finding.startswith("not measured here") for finding in on_cpus.findings)


def test_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(("dispatch",), None, nproc=1) == 2
    assert "pass --nproc 2" in capsys.readouterr().err
