"""ops.softmax_with_cross_entropy: the loss of labels whose classes are sharded over the ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import commlib
from commlib import ops
from commlib.errors import ArgumentError, DeviceError, DtypeError, RingError, ShapeError
from tests.support.checks import FLOATS, assert_bits_equal, assert_equal, bits, raises, settle, wide
from tests.support.class_shards import cross_entropy, drawn, labels, near, near_dtype, own
from tests.support.examples import examples
from tests.support.operator import ABSENT_RING, calls, compile_whole, generating, well_registered
from tests.support.ranks import Ranks, fresh
from tests.support.runs_on import runs_on

loss_of: Any = ops.softmax_with_cross_entropy
IGNORE = -100


def agrees(
    comm: Any, whole: torch.Tensor, label: torch.Tensor, sizes: list[int], ids: int, **how: Any
) -> None:
    """Loss, softmax and gradient of this rank's shard are those of the formulas over all shards.

    ``label`` is [..., ids], or without the last axis where that is 1.
    """
    case = f"{whole.dtype} {tuple(whole.shape)} in {sizes}, {label.dtype} {tuple(label.shape)}"
    mine = own(sizes, comm.rank)
    x = whole[..., mine].to(comm.device).requires_grad_()
    before = calls(comm)
    loss, softmax = loss_of(x, label.to(comm.device), return_softmax=True, **how)
    launched = calls(comm) - before
    weights = drawn(tuple(loss.shape), whole.dtype, seed=7)
    loss.backward(weights.to(comm.device))
    assert_equal(
        (launched, calls(comm) - before), (1, 1), f"{case}: collectives forward, and in all"
    )
    assert_equal(softmax.requires_grad, False, "a gradient through the softmax")
    ids_of_rows = wide(label).reshape(*whole.shape[:-1], ids)
    want = cross_entropy(wide(whole).astype("f8"), ids_of_rows, how.get("ignore_index", IGNORE))
    grad = want[2] * wide(weights)
    near_dtype(loss, want[0], whole.dtype, f"loss of {case}")
    near_dtype(softmax, want[1][..., mine], whole.dtype, f"softmax of {case}")
    assert x.grad is not None
    near_dtype(x.grad, grad[..., mine], whole.dtype, f"gradient of {case}")
    plain = loss_of(x.detach(), label.to(comm.device), **how)
    assert_bits_equal(plain, loss, f"without gradient and softmax: {case}")


def values(comm: Any) -> None:
    """Every dtype, with labels of every form, some of them ignored."""
    sizes = [11] * comm.size
    total = sum(sizes)
    for dtype in FLOATS:
        for kind in (torch.int64, torch.int32):
            for lead in ((6,), (3, 5)):
                logits = drawn((*lead, total), dtype)
                one = labels(lead, total, kind)
                agrees(comm, logits, one, sizes, 1, ignore_index=int(one.view(-1)[0]))
                one.view(-1)[1] = IGNORE
                agrees(comm, logits, one.unsqueeze(-1), sizes, 1)
            soft = labels((6, 3), total, kind)
            soft[1, 2] = IGNORE
            soft[2, 1] = soft[2, 0]
            agrees(comm, drawn((6, total), dtype), soft, sizes, 3)


def test_values(ranks: Ranks) -> None:
    ranks(values)


def test_values_of_three(three_ranks: Ranks) -> None:
    three_ranks(values)


@runs_on("ranks")
def test_upstream_case(comm: Any) -> None:
    """The batch of the upstream test: 1024 rows, 1000 classes, logits in ±40, int32 labels."""
    per_rank = 1000 // comm.size
    total = per_rank * comm.size
    label = labels((1024, 1), total, torch.int32)
    logits = drawn((1024, total), torch.float32, reach=40)
    ignored = int(label[0])
    mine = own([per_rank] * comm.size, comm.rank)
    x = logits[:, mine].to(comm.device)
    loss, softmax = loss_of(x, label.to(comm.device), ignore_index=ignored, return_softmax=True)
    want = cross_entropy(wide(logits).astype("f8"), wide(label), ignored)
    near(loss, want[0], "loss", 1e-6, 1e-6)
    near(softmax, want[1][:, mine], "softmax", 1e-5, 1e-9)


@runs_on("ranks")
def test_shapes(comm: Any) -> None:
    """Empty, single and odd sizes, shards of unequal size, and one without a class."""
    for sizes in ([1, 1], [4, 0], [0, 3], [2, 7]):
        total = sum(sizes)
        for lead in ((), (1,), (5,), (0,), (2, 0, 3)):
            agrees(comm, drawn((*lead, total), torch.float64), labels(lead, total, torch.int64),
                   sizes, 1)  # fmt: skip
    before = calls(comm)
    none = loss_of(torch.zeros(0, 0, device=comm.device), torch.zeros(0, device=comm.device).int())
    assert_equal(
        (tuple(none.shape), calls(comm) - before), ((0, 1), 1), "shape without rows or classes"
    )


@runs_on("ranks")
def test_strided(comm: Any) -> None:
    """Logits, labels and incoming gradients of any strides count with their values."""
    size = comm.size
    logits, label = drawn((6, 4 * size), torch.float32), labels((6,), 4 * size, torch.int64)
    x, label = logits[:, own([4] * size, comm.rank)].to(comm.device), label.to(comm.device)
    want = x.clone().requires_grad_()
    loss_of(want, label).sum().backward()
    wide_rows = torch.stack([x, x], 2)[..., 0]  # neither rows nor columns are dense
    for name, other in (
        ("transposed", x.t().contiguous().t()),
        ("in wider rows", torch.cat([x, x], 1)[:, :4]),
        ("stepped", wide_rows),
    ):
        leaf = other.detach().requires_grad_()
        loss = loss_of(leaf, torch.stack([label, label], 1)[:, 0])
        loss.sum().backward()
        assert_bits_equal(loss, loss_of(x, label), f"loss of {name}")
        assert_bits_equal(leaf.grad, want.grad, f"gradient of {name}")
    rows = x[:1].expand(6, 4)
    assert_bits_equal(loss_of(rows, label), loss_of(rows.contiguous(), label), "expanded")


@runs_on("ranks")
def test_infinities(comm: Any) -> None:
    """What torch gives for infinities and NaN, also where a whole shard is -inf."""
    sizes = [3] * comm.size
    total = sum(sizes)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits = drawn((7, total), dtype)
        label = torch.tensor([0, total - 1, 0, 1, 2, 0, IGNORE])
        logits[0, :3] = -torch.inf  # a shard, with the target in it
        logits[1, :3] = -torch.inf  # a shard without the target
        logits[2] = -torch.inf
        logits[3, 1], logits[3, 2] = -torch.inf, torch.inf
        logits[4, total - 1] = torch.nan
        logits[5, 0] = torch.inf
        logits[6] = -torch.inf
        exact = logits.double().clone().requires_grad_()
        want = torch.nn.functional.cross_entropy(exact, label, reduction="none")
        finite = [0, 1]
        want.sum().backward()
        mine = own(sizes, comm.rank)
        x = logits[:, mine].to(comm.device).requires_grad_()
        loss, softmax = loss_of(x, label.to(comm.device), return_softmax=True)
        near_dtype(loss[:, 0], want.detach().numpy(), dtype, f"loss {dtype}")
        softmax_want = exact.detach().softmax(1)[:, mine].numpy()
        near_dtype(softmax, softmax_want, dtype, f"softmax {dtype}")
        loss.sum().backward()
        assert x.grad is not None and exact.grad is not None
        at = torch.tensor(finite, device=comm.device)
        near_dtype(x.grad[at], exact.grad[finite, mine].numpy(), dtype, f"gradient {dtype}")
        assert_bits_equal(
            x.grad[6], torch.zeros_like(x.grad[6]), f"gradient of an ignored row {dtype}"
        )


@runs_on("ranks")
def test_large(comm: Any) -> None:
    """Classes that fill many blocks of one row, and rows that fill many blocks of temporaries."""
    for rows, classes in ((3, 70001), (3001, 257)):
        logits = drawn((rows, classes * comm.size), torch.float32)
        agrees(comm, logits, labels((rows,), logits.shape[1], torch.int64), [classes] * 2, 1)


@runs_on("ranks", deadline=120)
def test_streams_and_compiled(comm: Any) -> None:
    """Streams and compiled code give eager's bits, the gradient too."""
    sizes = [5] * comm.size
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        shard = drawn((6, sum(sizes)), dtype)[:, own(sizes, comm.rank)].to(comm.device)
        label = labels((6,), sum(sizes), torch.int64).to(comm.device)
        label[3] = IGNORE
        results = []
        for call, kwargs in (
            (loss_of, {}),
            (loss_of, {"use_calc_stream": False}),
            (compile_whole(loss_of), {}),
            (compile_whole(loss_of), {"use_calc_stream": False}),
        ):
            x = shard.clone().requires_grad_()
            loss, softmax = call(x, label, return_softmax=True, **kwargs)
            (loss * 3).sum().backward()
            results.append((loss, softmax, x.grad))
        for others in results[1:]:
            for name, other, first in zip(
                ("loss", "softmax", "grad"), others, results[0], strict=True
            ):
                assert_bits_equal(other, first, f"{name} {dtype}")
    assert_bits_equal(loss_of(shard, label), results[0][0], "without gradient")


@runs_on("ranks", deadline=120)
def test_compiled_for_any_batch(comm: Any) -> None:
    """One graph for any number of rows; the compiler may join nothing across the operator."""

    def body(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = loss_of(x * 2, label, ignore_index=1)
        return loss.sum() * 4

    graph = compile_whole(body, dynamic=True)
    for rows in (4, 9, 6):
        logits = drawn((rows, 8), torch.float32)[:, own([4, 4], comm.rank)].to(comm.device)
        label = labels((rows,), 8, torch.int64).to(comm.device)
        leaves = [logits.clone().requires_grad_() for _ in range(2)]
        before = calls(comm)
        for call, leaf in zip((graph, body), leaves, strict=True):
            call(leaf, label).backward()
        assert_equal(calls(comm) - before, 2, "collectives")
        assert_bits_equal(leaves[0].grad, leaves[1].grad, rows)


def generated(comm: Any) -> None:
    """With generated code around it, the operator keeps its bits."""
    graph = compile_whole(lambda x, label: loss_of(x * 2, label) * 4, backend="inductor")
    x = drawn((6, 8), torch.float32)[:, own([4, 4], comm.rank)].to(comm.device).requires_grad_()
    label = labels((6,), 8, torch.int64).to(comm.device)
    loss = graph(x, label)
    loss.sum().backward()
    assert_bits_equal(loss, loss_of(x * 2, label) * 4, "generated code")
    other = x.detach().clone().requires_grad_()
    (loss_of(other * 2, label) * 4).sum().backward()
    assert_bits_equal(x.grad, other.grad, "gradient in generated code")


def test_generated_code(unified_ranks: Ranks) -> None:
    generating(unified_ranks)(generated, deadline=240)


@runs_on("ranks")
def test_gradcheck(comm: Any) -> None:
    """Numeric against analytic, with every form of label; no second derivative."""
    sizes = [2, 4]
    logits = drawn((3, 6), torch.float64, reach=2).to(comm.device).requires_grad_()
    for label in ([0, 5, IGNORE], [[1], [2], [4]], [[0, 5], [3, 3], [IGNORE, 2]]):
        ids = torch.tensor(label, device=comm.device)

        def loss(x: torch.Tensor, ids: torch.Tensor = ids) -> torch.Tensor:
            shard = ops.identity(x)[:, own(sizes, comm.rank)]
            each: torch.Tensor = loss_of(shard, ids)
            return each

        assert_equal(torch.autograd.gradcheck(loss, (logits,)), True, label)
    (first,) = torch.autograd.grad(loss(logits).sum(), logits, create_graph=True)
    with raises(ArgumentError, "has no gradient"):
        first.sum().backward()


@runs_on("ranks")
def test_registration(comm: Any) -> None:
    """Run torch's own checks of a registered operator: schema, fake against real, autograd."""
    registered = torch.ops.commlib.softmax_with_cross_entropy.default
    backward = torch.ops.commlib.softmax_with_cross_entropy_grad.default
    for dtype in (torch.float64, torch.bfloat16):
        for label in (labels((4, 2), 6, torch.int64), labels((4, 2, 3), 6, torch.int32)):
            for return_softmax in (True, False):
                x = drawn((4, 2, 3), dtype).to(comm.device).requires_grad_()
                rest = (label.to(comm.device), 0, IGNORE, return_softmax, True)
                well_registered(registered, (x, *rest))
            loss, _, *saved = registered(x, *rest)
            args = (torch.ones_like(loss), x.detach(), *saved)
            well_registered(backward, args)


@st.composite
def batch(draw: st.DrawFn) -> tuple[list[int], list[list[int]], int]:
    """Shards of two ranks, the ids of each row, and which id is ignored."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=2, max_size=2).filter(any))
    ids, ignore_index = draw(st.integers(1, 3)), draw(st.integers(-3, sum(sizes)))
    one = st.integers(0, sum(sizes) - 1) | st.just(ignore_index)
    row = st.lists(one, min_size=ids, max_size=ids)
    return sizes, draw(st.lists(row, min_size=1, max_size=4)), ignore_index


@examples(6)
@given(batches=st.lists(batch(), min_size=8, max_size=8))
@runs_on("ranks")
def test_any_batches(comm: Any, batches: list[tuple[list[int], list[list[int]], int]]) -> None:
    for sizes, rows, ignore_index in batches:
        label = torch.tensor(rows)
        logits = drawn((len(rows), sum(sizes)), torch.float64)
        agrees(comm, logits, label, sizes, label.shape[1], ignore_index=ignore_index)


# -- on GPUs -------------------------------------------------------------------------------------


@runs_on("all_gpu_ranks", deadline=120)
def test_captured(comm: Any) -> None:
    """A capture, the first use of these kernels, is replayed with new inputs: eager's bits."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        sizes = [131, 131]
        x = torch.zeros(5, 131, dtype=dtype, device=comm.device, requires_grad=True)
        label = torch.zeros(5, dtype=torch.int64, device=comm.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss, softmax = loss_of(x, label, return_softmax=True)
            (grad,) = torch.autograd.grad(loss.sum(), x)
        for seed in range(3):
            logits = drawn((5, 262), dtype, seed)
            with torch.no_grad():
                x.copy_(logits[:, own(sizes, comm.rank)])
            label.copy_(labels((5,), 262, torch.int64, seed))
            graph.replay()
            leaf = x.detach().clone().requires_grad_()
            want, want_softmax = loss_of(leaf, label, return_softmax=True)
            want.sum().backward()
            assert_bits_equal(loss, want, f"loss {dtype}")
            assert_bits_equal(softmax, want_softmax, f"softmax {dtype}")
            assert_bits_equal(grad, leaf.grad, f"gradient {dtype}")
        label[2] = 262
        graph.replay()
        assert_equal(
            loss[:, 0].isnan().tolist(), [False, False, True, False, False], "a label outside"
        )
        assert_equal(bool(grad[2].isnan().all()), True, "its gradient")


@runs_on("all_gpu_ranks")
def test_peak_memory(comm: Any) -> None:
    """Forward without softmax takes a few numbers a row, the backward one gradient."""
    x = torch.zeros(512, 2**15, dtype=torch.bfloat16, device=comm.device, requires_grad=True)
    label = torch.zeros(512, dtype=torch.int64, device=comm.device)
    loss_of(x, label).sum().backward()
    x.grad = None
    settle(comm)
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    loss = loss_of(x, label)
    assert_equal(torch.cuda.max_memory_allocated() - base < x.nbytes // 100, True, "forward")
    loss.sum().backward()
    assert_equal(torch.cuda.max_memory_allocated() - base < x.nbytes * 1.05, True, "with backward")


@pytest.mark.two_gpus
@runs_on("all_gpu_ranks")
def test_another_current_device(comm: Any) -> None:
    """The ring's GPU need not be the current one."""
    x = drawn((4, 6), torch.float32)[:, own([3, 3], comm.rank)].to(comm.device)
    label = labels((4,), 6, torch.int64).to(comm.device)
    want = loss_of(x, label)
    with torch.cuda.device(1 - comm.device.index):
        assert_bits_equal(loss_of(x, label), want)


# -- bad input -----------------------------------------------------------------------------------


@runs_on("ranks", deadline=120)
def test_bad_labels(comm: Any) -> None:
    """A bad label is the same error on every rank, with row, label and range; the ring goes on."""
    size = comm.size
    logits = drawn((6, 4 * size), torch.float32)
    x = logits[:, own([4] * size, comm.rank)].to(comm.device)
    good = labels((6,), 4 * size, torch.int64).to(comm.device)
    total = 4 * size
    graph = compile_whole(loss_of)
    for call in (loss_of, lambda x, label: loss_of(x.clone().requires_grad_(), label), graph):
        for value in (-1, total, 2**40, -(2**63)):
            label = good.clone()
            label[2] = label[4] = value
            with raises(ArgumentError, f"label {value} of row 2", f"0 to {total - 1}", IGNORE):
                call(x, label)
        label = good.clone()
        label[3] = comm.rank  # all of them valid
        with raises(ArgumentError, "row 3", "0 on ranks [0]", "1 on ranks [1]", "every rank"):
            call(x, label)
        if comm.rank == 1:
            label[0] = -5
        with raises(ArgumentError, "row 0", "-5 on ranks [1]"):
            call(x, label)
        soft = torch.stack([good, good.clone().index_fill_(0, good.new_tensor([5]), -7)], 1)
        with raises(ArgumentError, "label -7 of row 5"):
            call(x, soft)
        soft[:, 1] = comm.rank
        with raises(ArgumentError, "row 0", f"[{int(good[0])}, 0] on ranks [0]"):
            call(x, soft)
    want = cross_entropy(wide(logits).astype("f8"), wide(good)[:, None], IGNORE)
    near_dtype(loss_of(x, good), want[0], torch.float32, "after refusals")


@runs_on("ranks")
def test_unequal_calls(comm: Any) -> None:
    """Calls that differ between the ranks are an error on each, before anything is launched."""
    device, odd = comm.device, comm.rank == 1
    x, label = torch.zeros(4, 3, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    before = calls(comm)
    with raises(ShapeError, "rows of logits: 4 on ranks [0], 3 on ranks [1]"):
        loss_of(x[: 4 - odd], label[: 4 - odd])
    with raises(DtypeError, "torch.float32 on ranks [0], torch.float16 on ranks [1]"):
        loss_of(x.half() if odd else x, label)
    with raises(ShapeError, "ids per row", "1 on ranks [0], 2 on ranks [1]"):
        loss_of(x, label.view(4, 1).expand(4, 1 + odd))
    with raises(ArgumentError, "ignore_index: -100 on ranks [0], 0 on ranks [1]"):
        loss_of(x, label, ignore_index=0 if odd else -100)
    for logits in (x, x.clone().requires_grad_()):
        for wrong in (label[:3], label.float(), label.to("meta"), None):
            with raises(ArgumentError, "label" if odd else "invalid arguments on ranks [1]"):
                loss_of(logits, wrong if odd else label)
    other = ops.margin_cross_entropy if odd else loss_of
    with raises(ArgumentError, f"ranks [{1 - comm.rank}]", "another operator"):
        other(x, label)
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    """A wrong call is one of our errors with the numbers in it, with and without gradient."""
    x = torch.zeros(4, 3, device=comm.device)
    label = torch.zeros(4, dtype=torch.int64, device=comm.device)
    before = calls(comm)
    for logits in (x, x.clone().requires_grad_()):
        with raises(RingError, ABSENT_RING):
            loss_of(logits, label, ABSENT_RING)
        for wrong in (label[:3], label.view(2, 2), label.view(1, 4), label.view(4, 1)[:, :0]):
            with raises(ShapeError, tuple(wrong.shape), "(4, 3)", "(4, 1)"):
                loss_of(logits, wrong)
        with raises(DtypeError, "label is torch.float32", "int64", "label.long()"):
            loss_of(logits, label.float())
        with raises(ArgumentError, "label is list"):
            loss_of(logits, [0] * 4)
        with raises(DeviceError, "label is on meta", comm.device):
            loss_of(logits, label.to("meta"))
        with raises(DeviceError, "logits is on meta", comm.device):
            loss_of(logits.detach().to("meta").requires_grad_(logits is not x), label)
        for number in (1.0, True, None, "0"):
            with raises(ArgumentError, f"ignore_index={number!r}"):
                loss_of(logits, label, ignore_index=number)
        with raises(ArgumentError, "64 bits"):
            loss_of(logits, label, ignore_index=2**63)
    with raises(ArgumentError, "logits is list"):
        loss_of([[1.0]], label)
    with raises(DtypeError, "logits is torch.int64", "bfloat16", "logits.float()"):
        loss_of(x.long(), label)
    with raises(DtypeError, "complex64"):
        loss_of(x.to(torch.complex64), label)
    with raises(ShapeError, "0-D"):
        loss_of(x[0, 0], label[0])
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_one_rank(comm: Any) -> None:
    """A ring of one rank: the plain cross entropy, and errors like everywhere."""
    ring = commlib.new_ring(50 + comm.rank, [comm.rank])
    assert ring is not None
    x = drawn((4, 6), torch.float64).to(comm.device).requires_grad_()
    label = labels((4,), 6, torch.int64).to(comm.device)
    loss, softmax = loss_of(x, label, ring.ring_id, return_softmax=True)
    want = cross_entropy(wide(x), wide(label)[:, None], IGNORE)
    near_dtype(loss, want[0], torch.float64, "loss")
    near_dtype(softmax, want[1], torch.float64, "softmax")
    loss.sum().backward()
    assert x.grad is not None
    near_dtype(x.grad, want[2], torch.float64, "gradient")
    with raises(ArgumentError, "label 6 of row 0"):
        loss_of(x, label + 6 - label[0], ring.ring_id)


@runs_on("three_ranks")
def test_a_ring_in_another_order(comm: Any) -> None:
    """A ring may list its ranks in any order; classes follow the positions in it."""
    ring = commlib.new_ring(60, [2, 0])
    if ring is None:
        return
    sizes = [4, 2]
    logits, label = drawn((5, 6), torch.float64), labels((5,), 6, torch.int64)
    loss = loss_of(logits[:, own(sizes, ring.rank)], label, 60)
    want = cross_entropy(wide(logits), wide(label)[:, None], IGNORE)
    near_dtype(loss, want[0], torch.float64, "loss")
    assert_equal(bits(ops.all_gather(loss, 60)).reshape(2, -1).tolist(),
         np.tile(bits(loss).reshape(-1), (2, 1)).tolist(), "bits of all ranks")  # fmt: skip


def test_four_ranks() -> None:
    with fresh(4) as ranks:
        ranks(values)
