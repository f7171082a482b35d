"""compat.paddle: the legacy sampling of class centres."""

import inspect
from typing import Any

import torch

import commlib
from commlib import ops
from commlib.compat import paddle
from commlib.errors import ArgumentError, DtypeError, RingError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.operator import ABSENT_RING, calls, compile_whole
from tests.support.runs_on import runs_on

NEEDED = inspect.Parameter.empty
SIGNATURE = [
    *(("label", NEEDED), ("num_classes", NEEDED), ("num_samples", NEEDED)),
    *(("ring_id", 0), ("rank", 0), ("nranks", 1), ("fix_seed", False), ("seed", 0)),
]
IDS = [17, 10, 5, 18, 8, 8, 19, 14, 10, 14]


def test_arguments() -> None:
    parameters = inspect.signature(paddle.class_center_sample).parameters.values()

    assert [(p.name, p.default) for p in parameters] == SIGNATURE
    assert "``class_center_sample``" in str(inspect.getdoc(paddle.class_center_sample))


@runs_on("ranks")
def test_values(comm: Any) -> None:
    """The operator below; a seed counts with fix_seed alone; the legacy defaults: one rank."""
    label = torch.tensor(IDS, device=comm.device)
    rank_args = {"rank": comm.rank, "nranks": comm.size}

    def both(**how: Any) -> list[torch.Tensor]:
        return list(paddle.class_center_sample(label, 10, 6, 0, **rank_args, **how))

    for actual, want in (
        (both(fix_seed=True, seed=9), ops.class_center_sample(label, 10, 6, seed=9)),
        (both(fix_seed=True), ops.class_center_sample(label, 10, 6, seed=0)),
    ):
        for a, b in zip(actual, want, strict=True):
            assert_bits_equal(a, b, "with a seed")
    torch.manual_seed(1)
    drawn = [both(seed=9), both(seed=9)]
    torch.manual_seed(1)
    for one in drawn:
        for a, b in zip(one, ops.class_center_sample(label, 10, 6), strict=True):
            assert_bits_equal(a, b, "without a seed")
    ring = commlib.new_ring(80 + comm.rank, [comm.rank])
    assert ring is not None
    remapped, sampled = paddle.class_center_sample(label, 20, 6, ring.ring_id)
    assert_equal(remapped.tolist(), [4, 2, 0, 5, 1, 1, 6, 3, 2, 3], "remapped")
    assert_equal(sampled.tolist(), [5, 8, 10, 14, 17, 18, 19], "sampled")


@runs_on("ranks")
def test_compiled(comm: Any) -> None:
    label = torch.tensor(IDS, device=comm.device)

    def body(label: torch.Tensor) -> Any:
        return paddle.class_center_sample(label, 10, 4, 0, comm.rank, 2, True, 3)

    for actual, want in zip(compile_whole(body)(label), body(label), strict=True):
        assert_bits_equal(actual, want, "compiled")


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    """A wrong rank or size, and what the operator refuses, is an error before any launch."""
    label = torch.tensor(IDS, device=comm.device)
    before = calls(comm)
    for ring_id in (-1, ABSENT_RING):
        with raises(RingError, ring_id):
            paddle.class_center_sample(label, 10, 6, ring_id)
    with raises(ArgumentError, "nranks=1", "pass nranks=2"):
        paddle.class_center_sample(label, 10, 6)
    with raises(ArgumentError, "rank=5", f"pass rank={comm.rank}"):
        paddle.class_center_sample(label, 10, 6, 0, 5, 2)
    with raises(ArgumentError, "num_samples=11", "num_classes=10"):
        paddle.class_center_sample(label, 10, 11, 0, comm.rank, 2)
    with raises(DtypeError, "float32"):
        paddle.class_center_sample(label.float(), 10, 6, 0, comm.rank, 2)
    assert_equal(calls(comm), before, "calls launched by refused ones")
