"""`commlib bench fsdp-tp`: its work, what it makes of its figures, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

import commlib
from commlib import graph
from commlib.tools.bench import fsdp_tp as bench
from commlib.tools.bench.command import run_bench
from commlib.tools.bench.rounds import Samples
from examples import fsdp_tp
from tests.support.checks import assert_equal
from tests.support.operator import generating
from tests.support.ranks import NewRanks

SETTINGS = {"nproc": 2, "rounds": 2}
OURS, COMPILED, EAGER, VERIFIED = bench.OURS, bench.COMPILED, bench.EAGER, bench.VERIFIED


def samples(part: float) -> Samples:
    return {OURS: [part] * 2, COMPILED: [1.0] * 2, EAGER: [2.0] * 2}


def found(launches: float, computes: float, memory: float) -> dict[str, dict[str, Samples]]:
    taken = {**samples(memory), VERIFIED: [1.5]}
    return {
        bench.LAUNCH: {bench.STEP: samples(launches)},
        bench.COMPUTE: {bench.STEP: samples(computes), bench.MEMORY: taken},
    }


def test_report() -> None:
    report = bench.report(found(0.95, 1.01, 1.04), SETTINGS, "nccl")

    assert report.findings == (
        f"missed: launch-bound, step, {OURS} / torch.compile: 0.95, target at most 0.90",
        f"met: launch-bound, step, {OURS} / eager: 0.47, target at most 0.90",
        f"met: compute-bound, step, {OURS} / torch.compile: 1.01, target at most 1.02",
        f"met: compute-bound, step, {OURS} / eager: 0.51, target at most 1.02",
        f"met: compute-bound, memory, {OURS} / torch.compile: 1.04, target at most 1.05",
        f"compute-bound, memory, {VERIFIED} / torch.compile: 1.50",
        f"met: compute-bound, memory, {OURS} / eager: 0.52, target at most 1.05",
        f"compute-bound, memory, {VERIFIED} / eager: 0.75",
    )
    assert {len(row) for row in report.rows} == {len(report.columns)} and len(report.rows) == 10
    assert "2 shards x 1 parts of each layer, bfloat16" in report.caption
    assert "4096 hidden" in report.caption
    assert report.command == "commlib bench fsdp-tp --nproc 2 --rounds 2"
    on_four = bench.report(found(1, 1, 1), {"nproc": 4, "rounds": 2}, "nccl")
    assert "2 shards x 2 parts of each layer" in on_four.caption


def test_a_report_of_cpus_has_no_memory() -> None:
    figures = found(1, 1, 1)
    del figures[bench.COMPUTE][bench.MEMORY]

    report = bench.report(figures, SETTINGS, "gloo")

    assert len(report.findings) == 6 and len(report.rows) == 6
    assert all(finding.startswith("not measured here, needs GPUs: ") for finding in report.findings)


def test_losses_that_differ() -> None:
    same = {way: [4.0, 3.0] for way in bench.WAYS}
    bench.check(bench.LAUNCH, same)
    with pytest.raises(AssertionError, match=r"launch-bound, torch.compile: losses \[4.0, 3.3\]"):
        bench.check(bench.LAUNCH, same | {COMPILED: [4.0, 3.3]})


def training(comm: Any) -> None:
    """Graphs train as eager code does; the replay that is said to be verified is."""
    fsdp_tp.make_rings(bench.parts(comm.size))
    with bench._quick(comm):
        losses = {}
        for way in (OURS, EAGER):
            work = bench.Training(comm, bench.COMPUTE, way, verify=bench.STEPS)
            losses[way] = [float(work.step()) for _ in range(bench.STEPS)]
            verified = [sum(row["verified"] for row in graph.report())]
            losses[way].append(float(work.step()))
            verified.append(sum(row["verified"] for row in graph.report()))
            if way == OURS:
                assert_equal([count > 0 for count in verified], [False, True], f"{verified}")
                torch.compiler.reset()
    bench.check(bench.COMPUTE, losses)
    assert_equal(losses[EAGER][-1] < losses[EAGER][0], True, "the loss falls")
    for number in (fsdp_tp.DATA, fsdp_tp.TENSOR):
        commlib.close_ring(number)


def test_the_work(new_ranks: NewRanks) -> None:
    with new_ranks(2) as ranks:
        quick = hasattr(torch._inductor.config, bench.QUICK)
        (ranks if quick else generating(ranks))(training, deadline=300)


def test_refusals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_bench(("fsdp-tp",), None, nproc=3) == 2
    monkeypatch.setattr(bench, "PROGRAM", tmp_path / "fsdp_tp.py")
    assert run_bench(("fsdp-tp",), None) == 2
    said = capsys.readouterr().err
    assert "3 ranks: expected 2, 4 or 8; pass --nproc 2" in said
    assert "an installed commlib has no examples; use a checkout" in said
