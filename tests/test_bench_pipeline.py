"""`commlib bench pipeline`: its work, and what it makes of its figures."""

from typing import Any

import torch

from commlib.tools.bench import pipeline
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.runs_on import runs_on

SMALL = pipeline.Size(blocks=4, width=32, heads=2, length=8, vocabulary=16)


def test_findings() -> None:
    gib = pipeline.GIBIBYTE
    eager = [[10 * gib, 11 * gib, 12 * gib]] * 2

    def findings(*taken: float) -> tuple[str, ...]:
        runs = [[int(each * gib) for each in taken]] * 2
        measured = {pipeline.GRAPHS: runs, pipeline.EAGER: eager}
        report = pipeline.report(measured, {"nproc": 2, "rounds": 2})
        assert_equal(report.command, "commlib bench pipeline --nproc 2 --rounds 2")
        assert_equal(len(report.rows), 6)
        return report.findings

    names = (
        "8 microbatches, graph.pipeline / eager",
        "growth from 4 to 16 microbatches, graph.pipeline / eager",
    )
    assert findings(11, 12, 13) == (
        f"met: {names[0]}: 1.09, target at most 1.10",
        f"met: {names[1]}: 0.98, target at most 1.02",
    )
    assert findings(11, 12.2, 13.8) == (
        f"missed: {names[0]}: 1.11, target at most 1.10",
        f"missed: {names[1]}: 1.05, target at most 1.02",
    )


@runs_on("unified_ranks")
def test_the_work(comm: Any) -> None:
    """Captured stages have the losses of eager ones, bit for bit."""
    torch.manual_seed(0)
    runs = [pipeline.train(comm, SMALL, (2, 3), captured=captured) for captured in (False, True)]
    for (_, expected), (_, actual) in zip(*runs, strict=True):
        assert_equal(len(actual), len(expected))
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_bits_equal(one, other, f"loss {i}")
    assert_equal(len(runs[1][-1][1]), 3 if comm.rank == comm.size - 1 else 0, "losses")
