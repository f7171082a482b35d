"""`commlib bench decode`: what it makes of its figures."""

import pytest
import torch

from commlib.tools.bench import decode
from commlib.tools.bench.command import run_bench

CALLS = (decode.OURS, decode.BY_NCCL, decode.LEGACY, decode.REDUCTIONS, decode.BARE)
MODEL = {"layers": 80, "hidden": 8192, "dtype": "bfloat16", "capacity": 512}


def test_report() -> None:
    times = {name: [0.010] for name in CALLS} | {decode.LEGACY: [0.050], decode.REDUCTIONS: [0.002]}
    slower = times | {decode.OURS: [0.012], decode.BARE: [0.0016]}
    measured = {"samples": {"1": times, "8": slower}, "model": MODEL}

    report = decode.report(measured, {"nproc": 2, "rounds": 1}, on_gpus=True)

    nccl, legacy, sums, first, second = report.findings
    assert nccl.startswith("missed: ") and nccl.endswith("worst batch: 1.20, target at most 0.80")
    assert legacy.startswith("met: ") and legacy.endswith("worst batch: 0.24, target at most 0.35")
    assert sums == (
        "missed: reductions with norms alone / ring.all_reduce(out, x) alone, worst batch: 1.25, "
        "target at most 1.10"
    )
    assert first == "batch 1: reductions with norms 2000 µs, 20% of a step; bare sums 10000 µs"
    assert second.startswith("batch 8: ") and "17% of a step" in second
    assert "80 layers of hidden 8192" in report.caption
    assert {len(row) for row in report.rows} == {len(report.columns)}
    on_cpus = decode.report(measured, {"nproc": 2, "rounds": 1}, on_gpus=False)
    assert all(finding.startswith("not measured here") for finding in on_cpus.findings[:3])


def test_results_that_differ() -> None:
    ways = {name: torch.ones(2) for name in CALLS[:3]}
    decode._check(ways)
    with pytest.raises(AssertionError, match=r"graph.capture: 0.5 of the largest output apart"):
        decode._check(ways | {decode.OURS: torch.tensor([1.0, 1.5])})


def test_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(("decode",), None, nproc=0) == 2
    assert "pass --nproc 2" in capsys.readouterr().err
    assert run_bench(("decode",), None, nproc=3) == 2
    assert "on 3 ranks; expected heads that divide by the ranks" in capsys.readouterr().err
