"""`commlib bench dispatch`: what it makes of its figures, and peers of other projects."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlib import CommContext
from commlib.tools.bench import dispatch
from commlib.tools.bench.command import run_bench
from commlib.tools.bench.dispatch_work import Work
from commlib.tools.bench.peers import expert_ways
from commlib.tools.bench.peers.expert_ways import ExpertPeers, same_rows
from commlib.tools.bench.peers.flashinfer_experts import COPIED, FLASHINFER
from commlib.tools.bench.peers.watch import Watch
from tests.support.runs_on import runs_on
from tests.support.torch_groups import initialised

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
    samples = {"128": WAYS, "4096": WAYS}

    report = dispatch.report(samples, {"nproc": 4, "rounds": 1}, "nccl")

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
    on_cpus = dispatch.report(samples, {"nproc": 2, "rounds": 1}, "gloo")
    assert all(finding.startswith("not measured here") for finding in on_cpus.findings)


def test_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(("dispatch",), None, nproc=1) == 2
    assert "pass --nproc 2" in capsys.readouterr().err


# -- peers of other projects ---------------------------------------------------------------------


def test_targets_over_flashinfer() -> None:
    """They are for few tokens alone, and each way is compared with its own time."""
    sent = {**THERE, FLASHINFER: [1e-5]}
    back = {**BACK, FLASHINFER: [4e-5], COPIED: [6e-5]}
    samples = {size: {dispatch.DISPATCH: sent, dispatch.COMBINE: back} for size in ("128", "4096")}
    settings = {"nproc": 4, "rounds": 1, "peers": "FOLDER"}

    report = dispatch.report(samples, settings, "nccl", ["libraries of peers: libmoe.so"])

    assert report.command == "commlib bench dispatch --nproc 4 --rounds 1 --peers FOLDER"
    assert [line for line in report.findings if FLASHINFER in line] == [
        f"missed: 128 tokens: expert_dispatch / {FLASHINFER}: 2.00, target at most 1.00",
        f"met: 128 tokens: expert_combine / {FLASHINFER}: 0.75, target at most 1.00",
    ]
    assert report.findings[-1] == "libraries of peers: libmoe.so"
    assert f"{COPIED}: into other memory" in report.caption
    assert {len(row) for row in report.rows} == {len(report.columns)}
    assert report.columns[-1].startswith(f"ratio to {FLASHINFER}")
    rows = {row[:3]: row[-1] for row in report.rows}
    assert rows["4096", "combine", COPIED].startswith("1.50 ")


def test_without_the_library_nothing_is_said_of_it() -> None:
    samples = {"128": {**WAYS, dispatch.DISPATCH: {**THERE, FLASHINFER: [1e-5]}}}
    settings = {"nproc": 4, "rounds": 1}

    alone = dispatch.report({"128": WAYS}, settings, "nccl")
    assert not any(FLASHINFER in text for text in (alone.caption, *alone.columns, *alone.findings))
    failed = dispatch.report(samples, settings, "nccl")  # its combine was left out
    rows = {row[:3]: row[-1] for row in failed.rows}
    assert rows["128", "combine", dispatch.OURS] == "-"
    assert dispatch.BURST % 2 == 0  # else a replay would begin with the flags of the last call


def test_rows_in_any_order_are_the_same_rows() -> None:
    rows = torch.randn(40, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(4))
    twice = rows.clone()
    twice[0] = rows[1]

    assert same_rows(rows[order], rows) and same_rows(rows[:0], rows[:0])
    assert not same_rows(twice, rows) and not same_rows(rows[1:], rows)


class Gathered:
    """Peers that bring every token to every rank, and then keep the right ones."""

    def __init__(self, work: Work, wrong: str) -> None:
        self.work, self.wrong = work, wrong
        self.parts = [torch.zeros_like(work.x) for _ in range(work.ring.size)]

    def dispatches(self) -> dict[str, Callable[[], object]]:
        return {"gather": lambda: dist.all_gather(self.parts, self.work.x)}

    def received(self) -> list[torch.Tensor]:
        wanted = self.work.receivers[:, :, self.work.ring.rank].bool()
        rows = [part[mask].flip(0) for part, mask in zip(self.parts, wanted, strict=True)]
        return rows[::-1] if self.wrong == "dispatch" else rows

    def combines(self) -> dict[str, Callable[[], object]]:
        copies = self.work.receivers[self.work.ring.rank].sum(1)[:, None]
        zeros = torch.zeros_like(self.work.x)
        return {
            "gather": lambda: self.work.x * copies,
            "zeros": lambda: zeros if self.wrong == "combine" else self.work.x * copies,
        }


@runs_on("cpu_ranks")
@pytest.mark.parametrize("wrong", ["", "dispatch", "combine"])
def test_a_peer_that_is_wrong_is_left_out(ring: CommContext, tmp_path: Path, wrong: str) -> None:
    watch = Watch(ring, str(tmp_path), [], lambda: None)
    with initialised(ring, "gloo"), pytest.MonkeyPatch.context() as patch:
        work = Work(ring, 8, 128, 8, 2)
        patch.setattr(expert_ways, "GpuMemory", lambda ring: None)
        patch.setattr(expert_ways, "load", lambda *_: Gathered(work, wrong))
        samples: Any = dispatch._samples(work, 2, watch, {"libmoe.so": "libmoe.so"})
        peers = ExpertPeers(ring, work.tokens, work.receivers, watch, {})

    sent, back = samples[dispatch.DISPATCH], samples[dispatch.COMBINE]
    assert ("gather" in sent, "gather" in back) == (wrong != "dispatch",) * 2
    assert ("zeros" in back) == (not wrong)
    assert {len(values) for values in (*sent.values(), *back.values())} == {2}
    assert not peers.dispatches and not peers.combines
    reasons = {
        "dispatch": ("gather", "8 tokens, dispatch", "gather: wrong tokens from rank 0"),
        "combine": ("zeros", "8 tokens, combine", "zeros: wrong sums of 8 tokens"),
    }
    if wrong:
        name, stage, reason = reasons[wrong]
        assert reason in watch.failed[name][stage]
    else:
        assert not watch.failed
