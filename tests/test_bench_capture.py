"""`commlib bench capture`: its work, eager and captured, and what it makes of its figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from commlib import graph
from commlib.tools.bench import capture
from commlib.tools.bench.capture_work import Counter, Large, Passes, Update, captured, check
from commlib.tools.bench.command import run_bench
from commlib.tools.bench.report import Report
from tests.support.runs_on import runs_on

OURS, EAGER = "graph.capture", "eager"
BARE, GRAPHED = "CUDAGraph by hand", "make_graphed_callables"
LENT = 'graph.capture, gradients="borrow"'
ADDED = 'graph.capture, gradients="accumulate"'
HOST, WALL, RESERVED = "host time, µs", "wall time, µs", "reserved, MiB"
GPUS = torch.cuda.device_count()


def samples(microseconds: Mapping[str, float]) -> dict[str, list[float]]:
    """Two rounds in which each call takes the same time."""
    return {name: [time / 1e6] * 2 for name, time in microseconds.items()}


def found(**changes: dict[str, Any]) -> dict[str, Any]:
    """Figures that meet every target but that of the memory, by a little."""
    kinds: dict[str, dict[str, Any]] = {
        "sequence": {
            HOST: samples({OURS: 100, BARE: 90, EAGER: 2000}),
            WALL: samples({OURS: 410, BARE: 400, EAGER: 2100}),
        },
        "module": {WALL: samples({OURS: 110, LENT: 90, ADDED: 80, GRAPHED: 100, EAGER: 500})},
        "tiny": {HOST: samples({OURS: 6.5, BARE: 4, EAGER: 5})},
        "memory": {RESERVED: {OURS: [300 * 2**20], BARE: [500 * 2**20]}},
    }
    return {"samples": kinds | changes, "graph": {"nodes": 123, "seconds": 0.456}}


def report(**changes: dict[str, Any]) -> Report:
    return capture.report(found(**changes), {"nproc": 1, "rounds": 2})


# -- table and findings --------------------------------------------------------------------------


def test_rows() -> None:
    made = report()

    assert made.columns[:4] == ("kind", "figure", "call", "median value")
    assert {len(row) for row in made.rows} == {len(made.columns)}
    by_name = {row[:3]: row[3:] for row in made.rows}
    assert len(by_name) == len(made.rows) == 3 + 3 + 5 + 3 + 2
    assert by_name["sequence", HOST, OURS] == ("100", "100..100", "0.05 (0.05..0.05)")
    assert by_name["sequence", WALL, EAGER][-1] == "5.25 (5.25..5.25)"
    assert by_name["module", WALL, GRAPHED][-1] == "1.00 (1.00..1.00)"
    assert by_name["tiny", HOST, OURS][:2] == ("6.50", "6.50..6.50")
    assert by_name["memory", RESERVED, BARE][0] == "500"
    assert "on 1 GPUs" in made.caption
    assert made.command == "commlib bench capture --nproc 1 --rounds 2"


def test_findings() -> None:
    assert report().findings == (
        f"met: sequence, host time, {OURS} / {EAGER}: 0.05, target at most 0.15",
        f"met: sequence, wall time, {OURS} / {BARE}: 1.02, target at most 1.05",
        f"met: module, wall time, {OURS} / {GRAPHED}: 1.10, target at most 1.20",
        f"met: module, wall time, {LENT} / {GRAPHED}: 0.90, target at most 1.00",
        f"met: module, wall time, {ADDED} / {GRAPHED}: 0.80, target at most 1.00",
        f"met: tiny, host time, {OURS} over {BARE}: 2.50 µs, target at most 3.00 µs",
        f"missed: memory, reserved, {OURS} / {BARE}: 0.60, target at most 0.50",
        "sequence: a graph of 123 nodes, captured in 0.46 s",
    )


def test_each_target_is_missed_by_itself() -> None:
    slow = report(
        sequence={
            HOST: samples({OURS: 400, BARE: 90, EAGER: 2000}),
            WALL: samples({OURS: 440, BARE: 400, EAGER: 2100}),
        },
        module={WALL: samples({OURS: 121, LENT: 101, ADDED: 101, GRAPHED: 100, EAGER: 500})},
        tiny={HOST: samples({OURS: 8, BARE: 4, EAGER: 5})},
        memory={RESERVED: {OURS: [100], BARE: [200]}},
    )

    words = [finding.partition(":")[0] for finding in slow.findings]
    assert words == [*["missed"] * 6, "met", "sequence"]
    assert slow.findings[5].endswith("4.00 µs, target at most 3.00 µs")


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(("capture",), None, nproc=0) == 2
    assert run_bench(("capture",), None, nproc=GPUS + 1) == 2
    said = capsys.readouterr().err
    assert "0 ranks: expected 1 or more" in said
    assert f"capture can't run here: {GPUS + 1} ranks need {GPUS + 1} GPUs" in said


# -- the work ------------------------------------------------------------------------------------


@runs_on("unified_ranks")
def test_the_work_gives_the_same_bits_captured(comm: Any) -> None:
    """What is measured gives the same captured as eagerly, and is not work of zeros."""
    eager, ours = Update(comm, 5), Update(comm, 5)
    steps = {EAGER: eager.after(eager.step), OURS: ours.after(captured(ours.step))}
    check("sequence", steps)
    assert all(bool(x.any()) for x in steps[EAGER])
    assert not torch.equal(eager.master[0], eager.low[0].float())

    plain, passes = Passes(comm.device), Passes(comm.device)
    forward = graph.capture(passes.module)
    results = {
        EAGER: plain.after(lambda: plain.both(plain.module)),
        OURS: passes.after(lambda: passes.both(forward)),
    }
    check("module", results)
    assert len(results[EAGER]) == 3 + 2 * 8 and all(bool(x.any()) for x in results[EAGER])

    counter = Counter(comm.device)
    assert counter.after(captured(counter.count))[0].tolist() == [3.0] * 8
    forward.reset()


def test_the_large_tensor_is_as_large_as_is_said() -> None:
    large = Large(torch.device("cpu"), 0)

    large.add()

    assert large.rows * large.x.nbytes == 64 * 2**20
    torch.testing.assert_close(large.out, large.x * large.rows, rtol=1e-3, atol=1e-3)


def test_other_bits_are_reported() -> None:
    zero = torch.zeros(2, dtype=torch.bfloat16)

    check("tiny", {EAGER: [zero], OURS: [zero.clone()]})
    with pytest.raises(AssertionError, match=r"tiny, graph\.capture: not the bits"):
        check("tiny", {EAGER: [zero], OURS: [-zero]})
    with pytest.raises(ValueError, match="argument 2"):
        check("tiny", {EAGER: [zero, zero], OURS: [zero]})


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("nproc", [1, 2])
def test_on_gpus(nproc: int, tmp_path: Path) -> None:
    assert run_bench(("capture",), str(tmp_path), nproc=nproc, rounds=1) == 0

    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert f"`commlib bench capture --nproc {nproc} --rounds 1`" in text
    assert text.count(" target at most ") == len(capture.GOALS)
