"""compat.paddle: several labels per row, batch norm over a ring, and joined tensors."""

from typing import Any

import numpy as np
import pytest
import torch

from commlib import graph
from commlib.compat import paddle
from commlib.errors import ArgumentError, DtypeError, ShapeError
from tests.support.checks import Array, assert_bits_equal, assert_equal, raises, sample, wide
from tests.support.class_shards import drawn, labels, own
from tests.support.operator import calls, compile_whole
from tests.support.runs_on import runs_on

Tensor = torch.Tensor
ROWS, CLASSES, LABELS, IGNORED = 5, 4, 3, -100
LOSS = paddle.c_softmax_with_multi_label_cross_entropy
# Sums of a few float32 numbers in another order than NumPy's in float64.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


def label_and_weight(ranks: int) -> tuple[Tensor, Tensor]:
    draw = np.random.default_rng(3)
    label = torch.from_numpy(draw.integers(0, CLASSES * ranks, (ROWS, LABELS)))
    label[1, 2] = label[4, 0] = IGNORED
    return label, torch.from_numpy(draw.random((ROWS, LABELS))).float()


def expected_loss(
    comm: Any, label: Tensor, weight: Tensor, by: Array, summed: bool
) -> tuple[Array, Array, Array]:
    """Return softmax, loss and the gradient of ``(loss * by).sum()``, in float64."""
    shards = [wide(sample(r, (ROWS, CLASSES), torch.float32)) for r in range(comm.size)]
    logits = np.concatenate(shards, 1).astype(np.float64)
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    valid = label.numpy() != IGNORED
    at = np.where(valid, label.numpy(), 0)
    weights = weight.numpy() * valid
    loss = -np.log(np.take_along_axis(softmax, at, 1)) * weights
    slopes = weights * by  # of each label
    gradient = softmax * slopes.sum(1, keepdims=True)
    for row in range(ROWS):
        np.subtract.at(gradient[row], at[row], slopes[row])
    cols = slice(comm.rank * CLASSES, (comm.rank + 1) * CLASSES)
    return softmax[:, cols], loss.sum(1, keepdims=True) if summed else loss, gradient[:, cols]


@pytest.mark.parametrize("summed", [True, False], ids=["summed", "each"])
@runs_on("ranks")
def test_several_labels(comm: Any, summed: bool) -> None:
    """Softmax, loss and gradient are those of the formula; compiled code gives the same."""
    label, weight = label_and_weight(comm.size)
    by = np.arange(1.0, ROWS * (1 if summed else LABELS) + 1).reshape(ROWS, -1)
    want = expected_loss(comm, label, weight, by, summed)
    arguments = (label.to(comm.device), weight.to(comm.device), IGNORED, summed)
    options = {"rank": comm.rank, "nranks": comm.size}

    def body(logits: Tensor) -> tuple[Tensor, Tensor]:
        return LOSS(logits, *arguments, **options)

    for call in (body, compile_whole(body)):
        logits = sample(comm.rank, (ROWS, CLASSES), torch.float32).to(comm.device).requires_grad_()
        softmax, loss = call(logits)
        (loss * torch.from_numpy(by).to(comm.device)).sum().backward()
        assert logits.grad is not None and not softmax.requires_grad
        for got, formula in zip((softmax, loss, logits.grad), want, strict=True):
            np.testing.assert_allclose(wide(got), formula, **CLOSE)


@runs_on("ranks")
def test_ranks_with_different_numbers_of_classes(comm: Any) -> None:
    """Loss and gradient are those of one rank with all classes, eager and compiled."""
    sizes = [CLASSES + 2 * rank for rank in range(comm.size)]
    total = sum(sizes)
    mine = own(sizes, comm.rank)
    label = labels((ROWS, LABELS), total, torch.int64)
    weight = label_and_weight(comm.size)[1]
    full = drawn((ROWS, total), torch.float32).requires_grad_()
    each = full.log_softmax(1).gather(1, label) * -weight
    each.sum().backward()
    assert full.grad is not None
    arguments = (label.to(comm.device), weight.to(comm.device))
    for call in (LOSS, compile_whole(lambda x: LOSS(x, *arguments))):
        logits = full.detach()[:, mine].to(comm.device).requires_grad_()
        softmax, loss = call(logits, *arguments) if call is LOSS else call(logits)
        loss.sum().backward()
        for got, want in (
            (softmax, full.softmax(1)[:, mine]),
            (loss, each.sum(1, keepdim=True)),
            (logits.grad, full.grad[:, mine]),
        ):
            np.testing.assert_allclose(wide(got), wide(want), **CLOSE)
    arguments[0][0, 0] = total
    with raises(ArgumentError, f"label {total}; expected a class, 0 to {total - 1}"):
        LOSS(logits, *arguments)
    with raises(ShapeError if comm.rank else ArgumentError, "(5, 3)" if comm.rank else "ranks [1]"):
        LOSS(logits[comm.rank :], *arguments)


@runs_on("cpu_ranks")
def test_several_labels_captured_on_a_cpu(comm: Any) -> None:
    """Replays have the loss and the gradient of their labels; a label outside gives NaN."""
    captured = graph.capture(LOSS, outputs="copy")
    weight = label_and_weight(comm.size)[1]
    for seed in range(4):
        label = labels((ROWS, LABELS), CLASSES * comm.size, torch.int64, seed)
        x = sample(comm.rank, (ROWS, CLASSES), torch.float32, seed)
        results = []
        for call in (captured, LOSS):
            logits = x.clone().requires_grad_()
            softmax, loss = call(logits, label, weight)
            loss.sum().backward()
            results.append((softmax, loss.detach(), logits.grad))
        for got, want in zip(*results, strict=True):
            assert_bits_equal(got, want, f"replay {seed}")
    label[2, 1] = -1
    loss = captured(x.requires_grad_(), label, weight)[1]
    assert_equal(loss.isnan().flatten().tolist(), [row == 2 for row in range(ROWS)], "NaN")


@runs_on("ranks")
def test_labels_that_are_refused(comm: Any) -> None:
    label, weight = (one.to(comm.device) for one in label_and_weight(comm.size))
    logits, before = sample(comm.rank, (ROWS, CLASSES), torch.float32).to(comm.device), calls(comm)
    beyond = label.clone()
    beyond[2, 1] = CLASSES * comm.size
    with raises(ArgumentError, f"label {CLASSES * comm.size}; expected a class", "ring 0"):
        LOSS(logits, beyond, weight)
    with raises(ShapeError, "(5, 4), (5, 3), (5, 2)"):
        LOSS(logits, label, weight[:, :2])
    with raises(ShapeError, "(4, 4), (5, 3), (5, 3)"):
        LOSS(logits[:4], label, weight)
    with raises(ArgumentError, "nranks=3"):
        LOSS(logits, label, weight, rank=comm.rank, nranks=3)
    assert_equal(calls(comm), before, "calls launched by refused ones")


def batch(rank: int, layout: str) -> Tensor:
    """Return the images of a rank; the ranks have different numbers of them."""
    images = sample(rank, (2 + rank, 3, 2, 2), torch.float32) + 5
    return images.movedim(1, -1).contiguous() if layout == "NHWC" else images


def parameters(device: torch.device) -> list[Tensor]:
    """Return running mean, running variance, scale and bias."""
    return [sample(9, (3,), torch.float32, seed).abs().to(device) for seed in range(4)]


def channels_second(tensor: Tensor, layout: str) -> Tensor:
    return tensor.movedim(-1, 1) if layout == "NHWC" else tensor


def weight_of(rank: int, layout: str) -> Tensor:
    """Return the gradient of a rank's result."""
    return sample(rank, tuple(batch(rank, layout).shape), torch.float32, seed=7)


def batch_norm_of(size: int, layout: str) -> tuple[Array, Array, Array, Array]:
    """Return mean, variance, result and gradient of all ranks' images, channels second."""
    ranks = range(size)
    images = torch.cat([batch(rank, layout) for rank in ranks]).double()
    weights = torch.cat([weight_of(rank, layout) for rank in ranks]).double()
    values = wide(channels_second(images, layout))
    means, variances = values.mean((0, 2, 3)), values.var((0, 2, 3))
    scale, bias = (
        wide(one).astype(np.float64).reshape(1, 3, 1, 1)
        for one in parameters(torch.device("cpu"))[2:]
    )
    deviation = np.sqrt(variances.reshape(1, 3, 1, 1) + 1e-5)
    normal = (values - means.reshape(1, 3, 1, 1)) / deviation
    slope = wide(channels_second(weights, layout)) * scale
    count = values.size / 3
    gradient = slope - slope.sum((0, 2, 3), keepdims=True) / count
    gradient -= normal * (slope * normal).sum((0, 2, 3), keepdims=True) / count
    return means, variances, normal * scale + bias, gradient / deviation


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@runs_on("ranks")
def test_batch_norm(comm: Any, layout: str) -> None:
    """Values, running values and gradients are those of batch norm over all ranks' images."""
    mean, variance, scale, bias = parameters(comm.device)
    x = batch(comm.rank, layout).to(comm.device).requires_grad_()
    scale.requires_grad_()
    y, mean_out, variance_out, center, inverse = paddle.sync_batch_norm(
        x, mean, variance, scale, bias, data_layout=layout
    )
    (y * weight_of(comm.rank, layout).to(comm.device)).sum().backward()

    means, variances, wanted, gradient = batch_norm_of(comm.size, layout)
    old = [wide(one).astype(np.float64) for one in parameters(torch.device("cpu"))]
    first = sum(2 + rank for rank in range(comm.rank))
    rows = slice(first, first + 2 + comm.rank)
    assert x.grad is not None and mean_out is mean and variance_out is variance
    near: Any = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(wide(channels_second(y, layout)), wanted[rows], **near)
    np.testing.assert_allclose(wide(channels_second(x.grad, layout)), gradient[rows], **near)
    np.testing.assert_allclose(wide(mean), 0.9 * old[0] + 0.1 * means, **CLOSE)
    np.testing.assert_allclose(wide(variance), 0.9 * old[1] + 0.1 * variances, **CLOSE)
    np.testing.assert_allclose(wide(center), means, **CLOSE)
    np.testing.assert_allclose(wide(inverse), 1 / np.sqrt(variances + 1e-5), rtol=1e-4)


@runs_on("ranks")
def test_batch_norm_of_a_negated_view(comm: Any) -> None:
    """The imaginary part of a conjugate is negated where it is read."""
    pairs = sample(comm.rank, (4, 3, 2), torch.float32).to(comm.device)
    x = torch.view_as_complex(pairs).conj().imag
    assert_equal(x.is_neg(), True, "a negated view")
    results = [paddle.sync_batch_norm(one, *parameters(comm.device)) for one in (x, x.clone())]
    for actual, want in zip(*results, strict=True):
        assert_bits_equal(actual, want)


@runs_on("ranks")
def test_batch_norm_by_running_values(comm: Any) -> None:
    """Neither form communicates or moves the running values; trainable statistics do both."""
    for options in ({"is_test": True}, {"use_global_stats": True}):
        mean, variance, scale, bias = parameters(comm.device)
        x, before = batch(comm.rank, "NCHW").to(comm.device), calls(comm)
        y, *_ = paddle.sync_batch_norm(x, mean, variance, scale, bias, **options)
        want = torch.nn.functional.batch_norm(x, mean, variance, scale, bias)
        torch.testing.assert_close(y, want)
        assert_bits_equal(mean, parameters(comm.device)[0], "the running mean")
        assert_equal(calls(comm), before, "collectives")
    paddle.sync_batch_norm(x, mean, variance, scale, bias, is_test=True, trainable_statistics=True)
    assert_equal(torch.equal(mean, parameters(comm.device)[0]), False, "moved")


@runs_on("ranks")
def test_batch_norm_refusals(comm: Any) -> None:
    state, before = parameters(comm.device), calls(comm)
    x = batch(comm.rank, "NCHW").to(comm.device)
    with raises(ArgumentError, "data_layout='CHW'", "NHWC"):
        paddle.sync_batch_norm(x, *state, data_layout="CHW")
    with raises(ShapeError, "NHWC", "one number per channel"):
        paddle.sync_batch_norm(x, *state, data_layout="NHWC")
    with raises(ShapeError, "(3,)", "two dims"):
        paddle.sync_batch_norm(x[0, :, 0, 0], *state)
    assert_equal(calls(comm), before, "calls launched by refused ones")


def tables() -> list[Tensor]:
    return [sample(rank, (2, 5), torch.float32).requires_grad_() for rank in range(3)]


@pytest.mark.parametrize(
    ("start", "length", "columns"),
    [(0, -1, slice(0, 5)), (1, 3, slice(1, 4)), (-2, -1, slice(3, 5)), (4, 0, slice(4, 4))],
)
def test_columns_of_several_tensors(start: int, length: int, columns: slice) -> None:
    x = tables()
    arrays = [wide(one)[:, columns] for one in x]
    joined, total = paddle.partial_concat(x, start, length), paddle.partial_sum(x, start, length)
    assert_equal(joined.tolist(), np.concatenate(arrays, 1).tolist())
    assert_equal(total.tolist(), (arrays[0] + arrays[1] + arrays[2]).tolist())
    (joined.sum() * 2 + total.sum()).backward()
    want = np.zeros((2, 5))
    want[:, columns] = 3
    assert all(one.grad is not None and one.grad.tolist() == want.tolist() for one in x)


def test_columns_that_are_refused() -> None:
    x = tables()
    for call in (paddle.partial_concat, paddle.partial_sum):
        with raises(ShapeError, "start_index=5", "5 columns"):
            call(x, 5)
        with raises(ShapeError, "start_index=-6"):
            call(x, -6)
        with raises(ShapeError, "length=4"):
            call(x, 2, 4)
        with raises(ShapeError, "(2, 5)", "(1, 5)"):
            call([x[0], x[1][:1]])
        with raises(ShapeError, "two dims"):
            call([x[0][0]])
        with raises(DtypeError, "float32", "float64"):
            call([x[0], x[1].double()])
        with raises(ArgumentError, "x is empty"):
            call([])


def test_one_buffer_for_several_tensors() -> None:
    """Views begin at multiples of 256 bytes, and share the buffer's memory."""
    x = [sample(0, shape, torch.float32) for shape in ((3, 4), (65,), (1,))]
    views, fused = paddle.coalesce_tensor(x, torch.float32, copy_data=True)
    assert_equal(fused.shape, (64 + 128 + 64,))
    assert_equal([view.data_ptr() - fused.data_ptr() for view in views], [0, 256, 768])
    for view, one in zip(views, x, strict=True):
        assert_bits_equal(view, one)
    fused.fill_(3)
    assert all(bool((view == 3).all()) for view in views)
    views, fused = paddle.coalesce_tensor(
        x, torch.float32, set_constant=True, constant=2.0, use_align=False
    )
    assert_equal(fused.tolist(), [2.0] * 78)
    options = {"copy_data": True, "set_constant": True, "constant": 2.0}
    views, fused = paddle.coalesce_tensor(x, torch.float32, **options)
    for view, one in zip(views, x, strict=True):
        assert_bits_equal(view, one, "a copy instead of the constant")
    assert_equal(fused[12:64].tolist(), [0.0] * 52, "a gap")
    views, fused = paddle.coalesce_tensor(
        x, torch.float32, align_size=8, concated_shapes=[12, 5, 13, 1], concated_ranks=[1, 2, 1]
    )
    assert_equal([tuple(view.shape) for view in views], [(12,), (5, 13), (1,)])
    assert_equal(fused.tolist(), [0.0] * (12 + 66 + 2))


def test_buffers_that_are_refused() -> None:
    x = [torch.ones(2), torch.ones(3)]
    with raises(ArgumentError, "input is empty"):
        paddle.coalesce_tensor([], torch.float32)
    with raises(DtypeError, "float32", "dtype=torch.float64"):
        paddle.coalesce_tensor(x, torch.float64)
    with raises(ArgumentError, "align_size=6", "4 bytes"):
        paddle.coalesce_tensor(x, torch.float32, align_size=6)
    with raises(ShapeError, "concated_ranks=[1]"):
        paddle.coalesce_tensor(x, torch.float32, concated_shapes=[2], concated_ranks=[1])
    with raises(ShapeError, "(3,), (2,)", "as many elements"):
        paddle.coalesce_tensor(x, torch.float32, concated_shapes=[3, 2], concated_ranks=[1, 1])
