"""examples/face_classifier.py: sharded ArcFace training reaches the losses of one process."""

import importlib.util
import sys
from typing import Any

import pytest

import commlib
from tests.support.checks import assert_equal
from tests.support.processes import ROOT, run
from tests.support.ranks import UNIFIED, Ranks

EXAMPLE = "examples/face_classifier.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("face_classifier", ROOT / EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(comm: Any) -> None:
    """A few steps on these ranks and in one process: the same losses, and smaller ones."""
    faces = example()
    alone = commlib.new_ring(90 + comm.rank, [comm.rank])
    losses = faces.train_on_ranks(comm, 8)
    wanted = faces.train_alone(alone, comm.size, 8)
    apart = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    assert_equal(apart < faces.TOLERANCE, True, f"{losses} against {wanted}")
    assert_equal(losses[-1] < 0.8 * losses[0], True, f"losses {losses}")


def test_ranks(ranks: Ranks) -> None:
    ranks(trained)


def test_uneven_shards(three_ranks: Ranks) -> None:
    three_ranks(trained)


@pytest.mark.parametrize("engine", UNIFIED)
def test_program(engine: str) -> None:
    flag = {"FLAGS_dynamic_static_unified_comm": UNIFIED[engine], "CUDA_VISIBLE_DEVICES": ""}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]

    code, out, err = run(*launcher, "--nproc-per-node", "2", EXAMPLE, "--steps", "3", **flag)

    assert code == 0, err
    head, *rows, last = out.splitlines()
    assert " ".join(head.split()) == "step loss on 2 ranks in one process apart"
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert last.endswith("allowed 1e-09")


def test_one_process() -> None:
    code, out, err = run(EXAMPLE, "--steps", "2")

    assert code == 0, err
    assert "loss on 1 ranks" in out and sys.executable not in out
