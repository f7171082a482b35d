"""`commlib bench c10d` and `c10d-decode`: what they make of their figures, and refusals."""

import pytest

from commlib.tools.bench.c10d import decode, training
from commlib.tools.bench.c10d.groups import OURS, STOCK
from commlib.tools.bench.c10d.programs import DDP, FSDP
from commlib.tools.bench.command import run_bench
from commlib.tools.bench.launch import launch
from commlib.tools.bench.rounds import Samples
from commlib.tools.launch import LaunchError

SETTINGS = {"nproc": 2, "rounds": 2}
PAIR = f"{OURS} / {STOCK}"


def samples(part: float) -> Samples:
    return {OURS: [part * 1e-3] * 2, STOCK: [1e-3] * 2}


def found(host: float, step: float, memory: float) -> dict[str, dict[str, Samples]]:
    both = {training.STEP: samples(step), training.MEMORY: samples(memory)}
    return {training.CALL: {training.HOST: samples(host)}, DDP: both, FSDP: both}


def test_report() -> None:
    good = training.report(found(0.55, 1.01, 0.99), SETTINGS, "nccl")
    bad = training.report(found(0.65, 1.04, 1.02), SETTINGS, "nccl")

    assert good.findings == (
        f"met: dist.all_reduce, 4 B, host time, {PAIR}: 0.55, target at most 0.60",
        f"met: DDP, step, {PAIR}: 1.01, target at most 1.02",
        f"met: FSDP2, step, {PAIR}: 1.01, target at most 1.02",
        f"met: DDP, memory, {PAIR}: 0.99, target at most 1.00",
        f"met: FSDP2, memory, {PAIR}: 0.99, target at most 1.00",
    )
    assert all(finding.startswith("missed: ") for finding in bad.findings)
    assert {len(row) for row in good.rows} == {len(good.columns)} and len(good.rows) == 10
    assert "stock NCCL" in good.caption and "25.6 M" in good.caption
    assert good.command == "commlib bench c10d --nproc 2 --rounds 2"


def test_a_report_of_cpus_has_no_memory() -> None:
    figures = found(0.5, 1.0, 1.0)
    for program in (DDP, FSDP):
        figures[program] = {training.STEP: samples(2.0)}

    report = training.report(figures, SETTINGS, "gloo")

    assert all(finding.startswith("not measured here, needs GPUs: ") for finding in report.findings)
    assert report.findings[-1].endswith(f": FSDP2, memory, {PAIR}") and len(report.rows) == 6
    assert "stock gloo" in report.caption


def test_report_of_a_decode() -> None:
    good, bad = (
        decode.report({"eager": samples(a), "captured": samples(b)}, SETTINGS, "nccl")
        for a, b in ((0.84, 0.74), (0.87, 0.77))
    )
    assert good.findings == (
        f"met: eager, {PAIR}: 0.84, target at most 0.85",
        f"met: captured, {PAIR}: 0.74, target at most 0.75",
    )
    assert [text.partition(":")[0] for text in bad.findings] == ["missed", "missed"]
    assert {len(row) for row in good.rows} == {len(good.columns)} and len(good.rows) == 4
    assert "32 layers of hidden 4096, bfloat16" in good.caption


def test_tokens_that_differ() -> None:
    same, other = ({"eager": [1, 2], "captured": x} for x in ([1, 2], [1, 3]))
    decode.check({OURS: [same, same], STOCK: [same]}, 2)
    with pytest.raises(LaunchError, match=r"captured, backend .*\[1, 3\], expected \[1, 2\]"):
        decode.check({OURS: [same, other], STOCK: [same]}, 2)
    apart = {"eager": [4, 5], "captured": [4, 5]}
    decode.check({OURS: [apart], STOCK: [same]}, 4)  # sums of four, in another order
    with pytest.raises(LaunchError, match="expected"):
        decode.check({OURS: [apart], STOCK: [same]}, 2)


def test_losses_that_differ() -> None:
    training.check(DDP, {OURS: [1.001, 2.0], STOCK: [1.0, 2.0]})
    for wrong in (1.02, float("nan")):
        with pytest.raises(AssertionError, match="DDP: losses"):
            training.check(DDP, {OURS: [1.0, wrong], STOCK: [1.0, 1.0]})


@pytest.mark.usefixtures("warm_launches")
def test_the_processes_whose_memory_is_read() -> None:
    """They run on CPUs too, where they take no bytes of a GPU."""
    for backend in ("commlib", "gloo"):
        assert launch("c10d.memory", 2, backend=backend, kind="cpu") == {DDP: 0, FSDP: 0}


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(("c10d",), None, nproc=1) == 2
    assert run_bench(("c10d-decode",), None, nproc=3) == 2
    said = capsys.readouterr().err
    assert "1 ranks: expected 2 or more; pass --nproc 2" in said
    assert "3 ranks: expected 2, 4 or 8, a divisor of 8 heads; pass --nproc 2" in said
