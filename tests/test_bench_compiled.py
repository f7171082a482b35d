"""`commlib bench compiled`: its work, and what it makes of its figures."""

from typing import Any

from commlib.tools.bench import compiled
from commlib.tools.bench.capture_work import Passes
from tests.support.checks import assert_bits_equal
from tests.support.runs_on import runs_on

OURS, THEIRS, ALONE = compiled.OURS, compiled.THEIRS, compiled.ALONE


def samples(ours: float) -> dict[str, list[float]]:
    return {OURS: [ours / 1e6] * 2, THEIRS: [1e-4] * 2, ALONE: [3e-4] * 2}


def test_findings() -> None:
    good, bad = (
        compiled.report({"pass": samples(a), "forward": samples(b)}, {"nproc": 1, "rounds": 2})
        for a, b in ((90, 29), (101, 31))
    )
    assert good.findings == (
        f"met: pass, wall time, {OURS} / {THEIRS}: 0.90, target at most 1.00",
        f"met: forward, host time, {OURS} / {THEIRS}: 0.29, target at most 0.30",
    )
    assert [text.partition(":")[0] for text in bad.findings] == ["missed", "missed"]
    assert len(good.rows) == 6
    assert good.command == "commlib bench compiled --nproc 1 --rounds 2"


@runs_on("gpu_ranks")
def test_the_work(comm: Any) -> None:
    """What is measured has the bits of compiled code, and is not work of zeros."""
    ours, plain = Passes(comm.device), Passes(comm.device)
    forward, alone = compiled.compiled(ours), compiled.by_inductor(plain)
    results = ours.after(lambda: ours.both(forward))
    wanted = plain.after(lambda: plain.both(alone))
    for i, (actual, expected) in enumerate(zip(results, wanted, strict=True)):
        assert_bits_equal(actual, expected, f"tensor {i}")
        assert actual.abs().sum() > 0
