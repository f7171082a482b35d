"""`commlib bench dispatch`: what it makes of its figures."""

import pytest

from commlib.tools.bench import dispatch
from commlib.tools.bench.command import run_bench

TIMES = {dispatch.OURS: [2e-5], dispatch.FP8: [1e-5], dispatch.BARE: [1e-5], dispatch.PEER: [4e-5]}


def test_report() -> None:
    found = {"128": TIMES, "4096": TIMES | {dispatch.BARE: [2e-5]}}

    report = dispatch.report(found, {"nproc": 4, "rounds": 1}, "nccl")

    bare, peer, *more = report.findings
    assert bare.startswith("missed: 128 tokens") and bare.endswith("2.00, target at most 1.50")
    assert peer.startswith("met: 128 tokens") and peer.endswith("0.50, target at most 0.80")
    assert [finding.split(":")[0] for finding in more] == ["met", "met"]
    assert "7168 on each of 4 ranks, 8 random experts of 64" in report.caption
    assert {len(row) for row in report.rows} == {len(report.columns)}
    on_cpus = dispatch.report(found, {"nproc": 2, "rounds": 1}, "gloo")
    assert all(finding.startswith("not measured here") for finding in on_cpus.findings)


def test_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(("dispatch",), None, nproc=1) == 2
    assert "pass --nproc 2" in capsys.readouterr().err
