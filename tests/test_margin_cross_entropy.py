"""ops.margin_cross_entropy: the loss of cosines with a margin, over sharded classes."""

import functools
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import commlib
from commlib import ops
from commlib.errors import ArgumentError, DeviceError, DtypeError, RingError, ShapeError
from tests.support.checks import FLOATS, Array, assert_bits_equal, assert_equal, raises, wide
from tests.support.class_shards import NEAR, drawn, exponentials, labels, near, own
from tests.support.examples import examples
from tests.support.operator import ABSENT_RING, calls, compile_whole, well_registered
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

loss_of: Any = ops.margin_cross_entropy
Margins = tuple[float, float, float]

ARCFACE, COSFACE, SPHEREFACE = (1.0, 0.5, 0.0), (1.0, 0.0, 0.35), (1.35, 0.0, 0.0)
ALL_THREE, NONE = (0.9, 0.4, 0.15), (1.0, 0.0, 0.0)
KINDS = (ARCFACE, COSFACE, SPHEREFACE, ALL_THREE, NONE)
NUMBERS = ("margin1", "margin2", "margin3")


def formula(
    cosines: Array, label: Array, margins: Margins, scale: float
) -> tuple[Array, Array, Array]:
    """Return loss [N, 1], softmax, and the gradient of the loss by the cosines."""
    m1, m2, m3 = margins
    at = np.arange(len(label)), label
    x = cosines[at]
    angle, turns = np.arccos(x) * m1 + m2, m1 != 1 or m2 != 0
    logits = cosines.copy()
    logits[at] = (np.cos(angle) if turns else x) - m3
    z, total = exponentials(scale * logits)
    softmax = np.exp(z) / total
    grad = softmax.copy()
    grad[at] -= 1
    grad[at] *= m1 * np.sin(angle) / np.sqrt(1 - x * x) if turns else 1
    return (np.log(total)[:, 0] - z[at])[:, None], softmax, grad * scale


def agrees(
    comm: Any, whole: torch.Tensor, label: torch.Tensor, sizes: list[int], margins: Margins,
    scale: float = 64.0, reduction: str | None = None,
) -> None:  # fmt: skip
    """Loss, softmax and gradient of this rank's shard are those of the formula over all shards."""
    case = f"{whole.dtype} {tuple(whole.shape)} in {sizes}, {margins} {scale} {reduction}"
    mine = own(sizes, comm.rank)
    x = whole[:, mine].to(comm.device).requires_grad_()
    kwargs = dict(zip(NUMBERS, margins, strict=True), scale=scale, reduction=reduction)
    before = calls(comm)
    loss, softmax = loss_of(x, label.to(comm.device), return_softmax=True, **kwargs)
    launched = calls(comm) - before
    weights = drawn(tuple(loss.shape), whole.dtype, seed=7, reach=1)
    loss.backward(weights.to(comm.device))
    assert_equal(
        (launched, calls(comm) - before), (1, 1), f"{case}: collectives forward, and in all"
    )
    assert_equal((loss.dtype, softmax.dtype), (whole.dtype, whole.dtype), f"{case}: dtypes")
    want, want_softmax, grad = formula(
        wide(whole).astype("f8"), wide(label).ravel(), margins, scale
    )
    grad = grad * wide(weights)
    if reduction in ("mean", "sum"):
        want = getattr(want, reduction)()
        grad = grad / len(label) if reduction == "mean" else grad
    rtol, atol = NEAR[whole.dtype]
    # An error of the cosine counts scale times, in the loss as in the exponents.
    near(loss, want, f"loss of {case}", rtol, 2 * scale * min(rtol, 1e-7))
    near(softmax, want_softmax[:, mine], f"softmax of {case}", scale * rtol, atol)
    assert x.grad is not None
    near(x.grad, grad[:, mine], f"gradient of {case}", scale * rtol, scale * atol)
    plain = loss_of(x.detach(), label.to(comm.device), **kwargs)
    assert_bits_equal(plain, loss, f"without gradient and softmax: {case}")


def values(comm: Any) -> None:
    """Every dtype, margin, reduction and form of label."""
    sizes = [7, 4, 9][: comm.size]
    for dtype in FLOATS:
        logits = drawn((5, sum(sizes)), dtype, reach=0.9)
        for margins in KINDS:
            agrees(comm, logits, labels((5,), sum(sizes), torch.int64), sizes, margins)
        for reduction in ("mean", "sum", "none"):
            label = labels((5, 1), sum(sizes), torch.int32)
            agrees(comm, logits, label, sizes, ARCFACE, 2.0, reduction)


def test_values(ranks: Ranks) -> None:
    ranks(values)


def test_values_of_three(three_ranks: Ranks) -> None:
    three_ranks(values)


@runs_on("ranks")
def test_upstream_shards(comm: Any) -> None:
    """The shards of the upstream test, all of them uneven or small, and its scale."""
    for sizes in ([4, 8], [2, 2], [4, 2], [3, 9], [0, 5], [6, 0], [1, 0]):
        for rows in (5, 1, 0):
            logits = drawn((rows, sum(sizes)), torch.float64, reach=0.99)
            label = labels((rows,), sum(sizes), torch.int64)
            for margins in (ARCFACE, COSFACE, SPHEREFACE):
                agrees(comm, logits, label, sizes, margins)
    x = torch.zeros(0, 2, device=comm.device)
    label = torch.zeros(0, dtype=torch.int64, device=comm.device)
    assert_equal(loss_of(x, label).isnan().item(), True, "mean of no rows")
    assert_equal(loss_of(x, label, reduction="sum").item(), 0.0, "sum of no rows")


@runs_on("ranks")
def test_large(comm: Any) -> None:
    """Classes that fill many blocks of one row, and rows that fill many blocks of temporaries."""
    for rows, classes in ((3, 70001), (2001, 257)):
        sizes = [classes, classes]
        logits = drawn((rows, sum(sizes)), torch.float32, reach=0.9)
        agrees(comm, logits, labels((rows,), sum(sizes), torch.int64), sizes, ARCFACE, 8.0)


@runs_on("ranks")
def test_defaults(comm: Any) -> None:
    """ArcFace with scale 64, the mean of the rows."""
    x = drawn((4, 8), torch.float64, reach=0.9)[:, own([4, 4], comm.rank)].to(comm.device)
    label = labels((4,), 8, torch.int64).to(comm.device)
    kwargs = {"margin1": 1.0, "margin2": 0.5, "margin3": 0.0, "scale": 64.0, "reduction": "mean"}
    assert_bits_equal(loss_of(x, label), loss_of(x, label, **kwargs), "defaults")


@runs_on("ranks")
def test_at_the_ends(comm: Any) -> None:
    """At cosines of -1 and 1 the slope is that of the number next to it: finite and large."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        wider = torch.float64 if dtype is torch.float64 else torch.float32
        inside = 1 - torch.finfo(wider).eps / 2
        label = torch.tensor([0, 1], device=comm.device)
        logits = torch.tensor([[1.0, 0.5, 0.2, 0.1], [0.1, -1.0, 0.3, 0.2]], dtype=dtype)
        x = logits[:, own([2, 2], comm.rank)].to(comm.device).requires_grad_()
        loss = loss_of(x, label, scale=1.0, reduction="sum")
        loss.backward()
        assert_equal(bool(loss.isfinite()), True, f"loss {dtype}")
        near_end = wide(logits).astype("f8").clip(-inside, inside)
        want = formula(near_end, label.cpu().numpy(), ARCFACE, 1.0)
        assert x.grad is not None
        # sin(acos(x) + m) has few digits in the wider dtype itself where x is next to 1.
        near(x.grad, want[2][:, own([2, 2], comm.rank)], f"gradient {dtype}", 1e-2, 1e-2)


@runs_on("ranks", deadline=120)
def test_streams_and_compiled(comm: Any) -> None:
    """Streams and compiled code give eager's bits, the gradient too."""
    sizes = [5, 3]
    label = labels((6,), 8, torch.int64).to(comm.device)
    margins = dict(zip(NUMBERS, ALL_THREE, strict=True))
    kwargs: dict[str, Any] = {**margins, "return_softmax": True}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        shard = drawn((6, 8), dtype, reach=0.9)[:, own(sizes, comm.rank)].to(comm.device)
        for reduction in ("mean", None):
            results = []
            for call in (loss_of, compile_whole(loss_of)):
                for calc in (True, False):
                    x = shard.clone().requires_grad_()
                    loss, softmax = call(
                        x, label, reduction=reduction, use_calc_stream=calc, **kwargs
                    )
                    (loss * 3).sum().backward()
                    results.append((loss, softmax, x.grad))
            for others in results[1:]:
                for other, first in zip(others, results[0], strict=True):
                    assert_bits_equal(other, first, f"{dtype} {reduction}")


@runs_on("ranks")
def test_strided(comm: Any) -> None:
    """Cosines and labels of any strides count with their values."""
    logits, label = drawn((6, 8), torch.float32, reach=0.9), labels((6,), 8, torch.int64)
    x, label = logits[:, own([4, 4], comm.rank)].to(comm.device), label.to(comm.device)
    want = x.clone().requires_grad_()
    loss_of(want, label).backward()
    for name, other in (
        ("transposed", x.t().contiguous().t()),
        ("in wider rows", torch.cat([x, x], 1)[:, :4]),
        ("stepped", torch.stack([x, x], 2)[..., 0]),
    ):
        leaf = other.detach().requires_grad_()
        loss = loss_of(leaf, torch.stack([label, label], 1)[:, 0])
        loss.backward()
        assert_bits_equal(loss, loss_of(x, label), f"loss of {name}")
        assert_bits_equal(leaf.grad, want.grad, f"gradient of {name}")


@runs_on("ranks")
def test_gradcheck(comm: Any) -> None:
    """Numeric against analytic, for every kind of margin and reduction."""
    sizes = [2, 3]
    logits = drawn((3, 5), torch.float64, reach=0.8).to(comm.device).requires_grad_()
    label = labels((3,), 5, torch.int64).to(comm.device)

    def loss(x: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        shard = ops.identity(x)[:, own(sizes, comm.rank)]
        each: torch.Tensor = loss_of(shard, label, scale=4.0, **kwargs)
        return each

    for margins in KINDS:
        for reduction in ("mean", None) if margins == ARCFACE else ("sum",):
            kwargs = dict(zip(NUMBERS, margins, strict=True), reduction=reduction)
            call = functools.partial(loss, kwargs=kwargs)
            assert_equal(torch.autograd.gradcheck(call, (logits,)), True, kwargs)
    (first,) = torch.autograd.grad(loss(logits, {}), logits, create_graph=True)
    with raises(ArgumentError, "has no gradient"):
        first.sum().backward()


@runs_on("ranks")
def test_registration(comm: Any) -> None:
    """Run torch's own checks of a registered operator: schema, fake against real, autograd."""
    registered = torch.ops.commlib.margin_cross_entropy.default
    backward = torch.ops.commlib.margin_cross_entropy_grad.default
    label = labels((4, 1), 6, torch.int32).to(comm.device)
    for dtype in (torch.float64, torch.bfloat16):
        for mean in (False, True):
            x = drawn((4, 3), dtype, reach=0.9).to(comm.device).requires_grad_()
            numbers = (1.1, 0.3, 0.1, 8.0)
            args = (x, label, 0, *numbers, not mean, "mean" if mean else "none", True)
            well_registered(registered, args)
            loss, _, *saved = registered(*args)
            args = (torch.ones_like(loss), x.detach(), *saved, *numbers, mean)
            well_registered(backward, args)


@st.composite
def head(draw: st.DrawFn) -> tuple[list[int], list[int], Margins, float]:
    """Shards of two ranks, labels, margins and scale."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=2, max_size=2).filter(any))
    rows = draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=4))
    margin = functools.partial(st.sampled_from, (0.0, 0.25, 0.5))
    margins = draw(st.sampled_from((0.5, 1.0, 1.5))), draw(margin()), draw(margin())
    return sizes, rows, margins, draw(st.sampled_from((0.1, 1.0, 30.0)))


@examples(6)
@given(heads=st.lists(head(), min_size=8, max_size=8))
@runs_on("ranks")
def test_any_margins(comm: Any, heads: list[tuple[list[int], list[int], Margins, float]]) -> None:
    for sizes, rows, margins, scale in heads:
        logits = drawn((len(rows), sum(sizes)), torch.float64, reach=0.95)
        agrees(comm, logits, torch.tensor(rows), sizes, margins, scale)


# -- on GPUs -------------------------------------------------------------------------------------


@runs_on("all_gpu_ranks", deadline=120)
def test_captured(comm: Any) -> None:
    """A capture, the first use of these kernels, is replayed with new inputs: eager's bits."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        sizes = [130, 133]
        classes = sizes[comm.rank]
        x = torch.zeros(5, classes, dtype=dtype, device=comm.device, requires_grad=True)
        label = torch.zeros(5, dtype=torch.int64, device=comm.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss, softmax = loss_of(x, label, return_softmax=True, reduction=None)
            (grad,) = torch.autograd.grad(loss.sum(), x)
        for seed in range(3):
            logits = drawn((5, 263), dtype, seed, reach=0.9)
            with torch.no_grad():
                x.copy_(logits[:, own(sizes, comm.rank)])
            label.copy_(labels((5,), 263, torch.int64, seed))
            graph.replay()
            leaf = x.detach().clone().requires_grad_()
            want, want_softmax = loss_of(leaf, label, return_softmax=True, reduction=None)
            want.sum().backward()
            assert_bits_equal(loss, want, f"loss {dtype}")
            assert_bits_equal(softmax, want_softmax, f"softmax {dtype}")
            assert_bits_equal(grad, leaf.grad, f"gradient {dtype}")
        label[2] = -1
        with torch.no_grad():
            x[4] = 2.0
        graph.replay()
        assert_equal(loss[:, 0].isnan().tolist(), [False, False, True, False, True], "bad rows")
        assert_equal(
            grad.isnan().all(1).tolist(), [False, False, True, False, True], "their gradient"
        )


# -- bad input -----------------------------------------------------------------------------------


@runs_on("ranks", deadline=120)
def test_bad_rows(comm: Any) -> None:
    """A bad label, or a cosine without an angle, is the same error on every rank."""
    logits = drawn((6, 8), torch.float32, reach=0.9)
    x = logits[:, own([4, 4], comm.rank)].to(comm.device)
    good = labels((6,), 8, torch.int64).to(comm.device)
    want = loss_of(x, good)
    graph = compile_whole(loss_of)
    for call in (loss_of, lambda x, label, **how: loss_of(x.clone().requires_grad_(), label, **how),
                 graph):  # fmt: skip
        for value in (-1, -100, 8, 2**40):
            label = good.clone()
            label[1] = value
            with raises(ArgumentError, f"label {value} of row 1", "0 to 7"):
                call(x, label)
        label[1] = comm.rank
        with raises(ArgumentError, "row 1", "0 on ranks [0]", "1 on ranks [1]"):
            call(x, label)
        for far in (1.5, -1.5, float("inf")):
            label[1] = 5
            beyond = x.clone()
            if comm.rank == 1:
                beyond[1, 1] = far
            with raises(ArgumentError, f"row 1 has the cosine {far}", "label 5", "on rank 1"):
                call(beyond, label)
            label[1] = 0
            assert_equal(
                bool(call(beyond.nan_to_num(posinf=2), label).isfinite()), True, "not the label"
            )
    label[1] = 5
    beyond = torch.full_like(x, 1.5)
    assert_equal(bool(loss_of(beyond, label, margin2=0, margin3=0.3).isfinite()), True, "CosFace")
    beyond[1, 1] = torch.nan
    with raises(ArgumentError, "row 0"):
        loss_of(beyond, label)
    beyond = x.clone()
    beyond[1, 1] = torch.nan
    assert_equal(bool(loss_of(beyond, label).isnan()), True, "NaN stays NaN")
    assert_bits_equal(loss_of(x, good), want, "after refusals")


@runs_on("ranks")
def test_unequal_calls(comm: Any) -> None:
    """Calls that differ between the ranks are an error on each, before anything is launched."""
    odd = comm.rank == 1
    x = torch.zeros(4, 3, device=comm.device)
    label = torch.zeros(4, dtype=torch.int64, device=comm.device)
    before = calls(comm)
    with raises(ShapeError, "rows of logits: 4 on ranks [0], 3 on ranks [1]"):
        loss_of(x[: 4 - odd], label[: 4 - odd])
    with raises(DtypeError, "torch.float32 on ranks [0], torch.bfloat16 on ranks [1]"):
        loss_of(x.bfloat16() if odd else x, label)
    for name in (*NUMBERS, "scale"):
        with raises(ArgumentError, f"{name}: 0.25 on ranks [0], 1.25 on ranks [1]"):
            loss_of(x, label, **{name: 0.25 + odd})
    for logits in (x, x.clone().requires_grad_()):
        for wrong in (label[:3], label.float(), label.to("meta"), None):
            with raises(ArgumentError, "label" if odd else "invalid arguments on ranks [1]"):
                loss_of(logits, wrong if odd else label)
    assert_equal(calls(comm), before, "calls launched by refused ones")
    zero = -0.0 if odd else 0.0
    assert_equal(bool(loss_of(x, label, margin3=zero).isfinite()), True, "two zeros are one number")


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    """A wrong call is one of our errors with the numbers in it, with and without gradient."""
    x = torch.zeros(4, 3, device=comm.device)
    label = torch.zeros(4, dtype=torch.int64, device=comm.device)
    before = calls(comm)
    for logits in (x, x.clone().requires_grad_()):
        with raises(RingError, ABSENT_RING):
            loss_of(logits, label, ABSENT_RING)
        for wrong in (label[:3], label.view(2, 2), label.view(1, 4), label.view(4, 1).expand(4, 2)):
            with raises(ShapeError, tuple(wrong.shape), "(4, 3)", "[N, 1]"):
                loss_of(logits, wrong)
        for shape in ((12,), (2, 2, 3)):
            with raises(ShapeError, shape, "[N, D]"):
                loss_of(logits.reshape(shape), label)
        with raises(DtypeError, "label is torch.float32", "int64", "label.long()"):
            loss_of(logits, label.float())
        with raises(ArgumentError, "label is NoneType"):
            loss_of(logits, None)
        with raises(DeviceError, "label is on meta", comm.device):
            loss_of(logits, label.to("meta"))
        for name in (*NUMBERS, "scale"):
            for number in (float("nan"), float("inf"), "1", None):
                with raises(ArgumentError, f"{name}={number!r}", "finite"):
                    loss_of(logits, label, **{name: number})
        for number in (0, 0.0, -1.5):
            with raises(ArgumentError, f"scale={number!r}", "above 0"):
                loss_of(logits, label, scale=number)
        for word in ("max", "", 0):
            with raises(ArgumentError, f"reduction={word!r}", "mean"):
                loss_of(logits, label, reduction=word)
    with raises(DtypeError, "logits is torch.int32", "logits.float()"):
        loss_of(x.int(), label)
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_one_rank(comm: Any) -> None:
    """A ring of one rank: the same loss, and errors like everywhere."""
    ring = commlib.new_ring(70 + comm.rank, [comm.rank])
    assert ring is not None
    x = drawn((4, 6), torch.float64, reach=0.9).to(comm.device).requires_grad_()
    label = labels((4,), 6, torch.int64).to(comm.device)
    loss, softmax = loss_of(x, label, ring.ring_id, return_softmax=True, reduction=None)
    loss.sum().backward()
    want = formula(wide(x), wide(label), ARCFACE, 64.0)
    for actual, expected in zip((loss, softmax, x.grad), want, strict=True):
        near(actual, expected, "alone", 1e-10, 1e-12)
    with raises(ArgumentError, "label 6 of row 0"):
        loss_of(x, label + 6 - label[0], ring.ring_id)
