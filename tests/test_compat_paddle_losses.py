"""compat.paddle: the legacy losses over sharded classes."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import commlib
from commlib import ops
from commlib.compat import paddle
from commlib.compat.paddle.distributed import mp_ops
from commlib.errors import ArgumentError, RingError, ShapeError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.class_shards import drawn, labels, own
from tests.support.operator import ABSENT_RING, calls, compile_whole
from tests.support.runs_on import runs_on

NEEDED = inspect.Parameter.empty
PLACE = [("ring_id", 0), ("rank", 0)]
SIGNATURES = {
    "c_softmax_with_cross_entropy": [
        ("logits", NEEDED),
        ("label", NEEDED),
        ("ignore_index", -100),
        *PLACE,
        ("nranks", 0),
    ],
    "margin_cross_entropy": [
        ("logits", NEEDED),
        ("label", NEEDED),
        ("return_softmax", False),
        *PLACE,
        ("nranks", 1),
        ("margin1", 1.0),
        ("margin2", 0.5),
        ("margin3", 0.0),
        ("scale", 64.0),
    ],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments(name: str) -> None:
    parameters = inspect.signature(getattr(paddle, name)).parameters.values()

    assert [(p.name, p.default) for p in parameters] == SIGNATURES[name]
    assert f"``{name}``" in str(inspect.getdoc(getattr(paddle, name)))


def inputs(comm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shard = drawn((5, 3 * comm.size), torch.float64, reach=0.9)[:, own([3, 3], comm.rank)]
    label = labels((5, 1), 3 * comm.size, torch.int64).to(comm.device)
    return shard.to(comm.device).requires_grad_(), label


@runs_on("ranks")
def test_values(comm: Any) -> None:
    """Softmax first, then the loss of each row, with the gradient of the operators below."""
    rank_args = {"rank": comm.rank, "nranks": comm.size}
    (x, label), (other, _) = inputs(comm), inputs(comm)
    ignored = int(label[1])
    for kwargs in (rank_args, {}):
        softmax, loss = paddle.c_softmax_with_cross_entropy(x, label, ignored, 0, **kwargs)
        want = ops.softmax_with_cross_entropy(other, label, ignore_index=ignored)
        assert_equal(
            (tuple(loss.shape), float(loss[1]), softmax.requires_grad), ((5, 1), 0.0, False)
        )
        assert_bits_equal(loss, want, "loss")
        assert_bits_equal(softmax, x.softmax(1) if comm.size == 1 else softmax, "softmax")
        (grad,) = torch.autograd.grad(loss.sum(), x)
        assert_bits_equal(grad, torch.autograd.grad(want.sum(), other)[0], "gradient")
    margins: Any = {"margin1": 0.9, "margin2": 0.3, "margin3": 0.1, "scale": 8.0}
    want, want_softmax = ops.margin_cross_entropy(
        other, label, reduction=None, return_softmax=True, **margins
    )
    probs, loss = paddle.margin_cross_entropy(x, label, True, **rank_args, **margins)
    assert_bits_equal(loss, want, "margin loss")
    assert probs is not None
    assert_bits_equal(probs, want_softmax, "margin softmax")
    none, again = paddle.margin_cross_entropy(x, label, **rank_args, **margins)
    assert_equal((none, tuple(again.shape)), (None, (5, 1)), "without softmax")
    assert_bits_equal(again, want, "margin loss without softmax")
    (grad,) = torch.autograd.grad(again.sum(), x)
    assert_bits_equal(grad, torch.autograd.grad(want.sum(), other)[0], "margin gradient")
    _, arcface = paddle.margin_cross_entropy(x, label, **rank_args)
    assert_bits_equal(arcface, ops.margin_cross_entropy(other, label, reduction="none"), "defaults")


@runs_on("ranks")
def test_compiled(comm: Any) -> None:
    """Compiled as one graph they give eager's bits."""
    x, label = inputs(comm)

    def body(x: torch.Tensor, label: torch.Tensor) -> list[torch.Tensor]:
        softmax, loss = paddle.c_softmax_with_cross_entropy(x, label)
        _, margin = paddle.margin_cross_entropy(x, label, nranks=comm.size, rank=comm.rank)
        return [softmax, loss, margin]

    for actual, want in zip(compile_whole(body)(x, label), body(x, label), strict=True):
        assert_bits_equal(actual, want, "compiled")


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    """A wrong rank or size, and what the operators refuse, is an error before any launch."""
    x, label = inputs(comm)
    before = calls(comm)
    for call in (paddle.c_softmax_with_cross_entropy, paddle.margin_cross_entropy):
        for ring_id in (-1, ABSENT_RING):
            with raises(RingError, ring_id):
                call(x, label, ring_id=ring_id)
        with raises(ArgumentError, "nranks=3", "pass nranks=2"):
            call(x, label, nranks=3, rank=comm.rank)
        with raises(ArgumentError, "rank=5", f"pass rank={comm.rank}"):
            call(x, label, nranks=2, rank=5)
        with raises(ShapeError, (4, 1), (5, 3)):
            call(x, label[:4], nranks=2, rank=comm.rank)
    with raises(ArgumentError, "nranks=1", "pass nranks=2"):
        paddle.margin_cross_entropy(x, label)
    with raises(ArgumentError, "nranks=0", "pass nranks=2"):
        paddle.c_softmax_with_cross_entropy(x, label, rank=1)
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_one_rank(comm: Any) -> None:
    """On a ring of one rank the legacy defaults of margin_cross_entropy are right."""
    ring = commlib.new_ring(80 + comm.rank, [comm.rank])
    assert ring is not None
    x, _ = inputs(comm)
    label = labels((5, 1), 3, torch.int64).to(comm.device)
    softmax, loss = paddle.margin_cross_entropy(x, label, True, ring.ring_id, scale=1.0)
    want = ops.margin_cross_entropy(x, label, ring.ring_id, scale=1.0, reduction=None)
    assert_bits_equal(loss, want, "loss")
    assert softmax is not None
    softmax, _ = paddle.c_softmax_with_cross_entropy(x, label, ring_id=ring.ring_id)
    assert_bits_equal(softmax.sum(1), torch.ones(5).double(), "softmax", atol=1e-12)


@runs_on("ranks")
def test_numbers_of_labels(ring: Any) -> None:
    """A row has one label or more, at most as many as there are classes on all ranks."""
    logits, device = torch.zeros(3, 2, device=ring.device), ring.device
    for count in (0, 5):
        ids = torch.zeros(3, count, dtype=torch.int64, device=device)
        with raises(ArgumentError, f"label has {count} labels per row", "1 to 4"):
            mp_ops._c_softmax_with_cross_entropy(logits, ids)
        with raises(ArgumentError, f"label has {count} labels per row", "1 to 4"):
            mp_ops._c_softmax_with_multi_label_cross_entropy(logits, ids, ids.float())
    weights = torch.full((3, 4), 0.25, device=device)
    ids = torch.arange(4, device=device).expand(3, 4)
    loss: Any = mp_ops._c_softmax_with_multi_label_cross_entropy(logits, ids, weights)
    assert_equal(loss.shape, (3, 1), "as many labels as classes")
    logits = torch.zeros(3, 1 + 3 * ring.rank, device=device)  # one class, and four
    calls_of_labels: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
        mp_ops._c_softmax_with_cross_entropy,
        lambda x, ids: mp_ops._c_softmax_with_multi_label_cross_entropy(x, ids, ids.float()),
    ]
    for call in calls_of_labels:
        loss = call(logits, torch.arange(5, device=device).expand(3, 5))
        assert_equal(loss.shape, (3, 1), "as many labels as the ranks have together")
        with raises(ArgumentError, "label has 6 labels per row", "1 to 5"):
            call(logits, torch.zeros(3, 6, dtype=torch.int64, device=device))
