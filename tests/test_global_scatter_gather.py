"""ops.global_scatter and global_gather: rows to the experts that they are meant for, and back."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import commlib
from commlib import graph, ops
from commlib.errors import ArgumentError, DeviceError, DtypeError, RingError, ShapeError
from tests.support.checks import (
    Array,
    assert_bits_equal,
    assert_equal,
    bits,
    from_bits,
    laid_out,
    raises,
    sample,
    wide,
)
from tests.support.examples import examples
from tests.support.operator import ABSENT_RING, calls, compile_whole, generating
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

Counts = list[list[list[int]]]  # [a][b][k]: rows from rank a to expert k of rank b

DTYPES = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool)
# The vector of the operator's description: 2 ranks of 2 experts.
KNOWN: Counts = [[[2, 1], [1, 1]], [[1, 1], [2, 1]]]


def drawn(size: int, experts: int, most: int, seed: int) -> Counts:
    counts = np.random.default_rng(seed).integers(0, most, (size, size, experts), endpoint=True)
    nested: Counts = counts.tolist()
    return nested


def own_counts(comm: Any, counts: Counts, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """What this rank gives: local_count[k + b * experts], global_count[k + a * experts]."""
    local = torch.tensor(counts[comm.rank], device=device)
    expected = torch.tensor([row[comm.rank] for row in counts], device=device)
    return {"local_count": local.view(-1), "global_count": expected.view(-1)}


def rows_of(arrays: list[Array], counts: Counts, a: int, b: int, k: int) -> Array:
    """The rows of rank a for expert k of rank b: they stand by rank, then expert."""
    flat = [n for to in counts[a] for n in to]
    at = b * len(counts[a][b]) + k
    start = sum(flat[:at])
    return arrays[a][start : start + flat[at]]


def scattered(arrays: list[Array], counts: Counts, rank: int) -> Array:
    """One expert after the other; of each, one sender after the other."""
    size, experts = len(counts), len(counts[0][0])
    parts = [rows_of(arrays, counts, a, rank, k) for k in range(experts) for a in range(size)]
    return np.concatenate([arrays[rank][:0], *parts])


def inputs(counts: Counts, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [sample(r, (sum(map(sum, splits)), width), dtype) for r, splits in enumerate(counts)]


@runs_on("ranks")
def test_the_known_vector(comm: Any) -> None:
    x = torch.arange(1.0, 11.0, device=comm.device).view(5, 2)
    mine = own_counts(comm, KNOWN)
    received = ops.global_scatter(x, **mine)
    rows = [[1, 2, 1, 3, 2], [4, 3, 4, 5, 5]][comm.rank]
    assert_bits_equal(received, torch.stack([x[row - 1] for row in rows]).cpu(), "scattered")
    rows = [[1, 2, 4, 1, 4], [3, 5, 2, 3, 5]][comm.rank]
    assert_bits_equal(
        ops.global_gather(x, **mine), torch.stack([x[row - 1] for row in rows]).cpu(), "gathered"
    )


def both_ways(comm: Any, counts: Counts, width: int, dtype: torch.dtype, **how: Any) -> None:
    every = inputs(counts, width, dtype)
    x = laid_out(every[comm.rank], how.pop("layout", "contiguous"), comm.device)
    want = from_bits(scattered([bits(x) for x in every], counts, comm.rank), dtype)
    mine = own_counts(comm, counts, how.pop("device", "cpu"))
    received = ops.global_scatter(x, **mine, **how)
    assert_bits_equal(received, want, f"scattered {dtype} {how}")
    assert_bits_equal(
        ops.global_gather(received, **mine, **how), every[comm.rank], f"and back {dtype} {how}"
    )


def values(comm: Any) -> None:
    """Zero counts, no rows at all, odd widths; both streams; counts on either side."""
    for seed, (experts, most, width) in enumerate([(1, 3, 4), (3, 5, 7), (2, 0, 3), (2, 4, 0)]):
        counts = drawn(comm.size, experts, most, seed)
        for dtype in DTYPES:
            both_ways(comm, counts, width, dtype)
        both_ways(comm, counts, width, torch.float32, use_calc_stream=False)
        both_ways(comm, counts, width, torch.float32, device=comm.device)
        both_ways(comm, counts, width, torch.float32, layout="transposed")


def test_values(ranks: Ranks) -> None:
    ranks(values)


def test_values_of_three(three_ranks: Ranks) -> None:
    three_ranks(values)


entry = st.integers(0, 4)


@examples(20)
@given(flat=st.lists(entry, min_size=8, max_size=8))
def test_any_counts(ranks: Ranks, flat: list[int]) -> None:
    ranks(both_ways, np.array(flat).reshape(2, 2, 2).tolist(), 3, torch.float64)


@runs_on("ranks")
def test_gradients(comm: Any) -> None:
    """The gradient of one is the other, eager and compiled."""
    counts = drawn(comm.size, 2, 4, 11)
    every = inputs(counts, 3, torch.float64)
    mine = own_counts(comm, counts)
    want = scattered([wide(x) for x in every], counts, comm.rank)
    for call in (ops.global_scatter, compile_whole(ops.global_scatter)):
        x = every[comm.rank].to(comm.device, copy=True).requires_grad_()
        out = call(x, **mine)
        assert_bits_equal(out.detach(), want, "scattered")
        out.backward(out.detach() * 3)
        assert_bits_equal(x.grad, every[comm.rank] * 3, "what came, sent back")
    for call in (ops.global_gather, compile_whole(ops.global_gather)):
        received = torch.from_numpy(want.copy()).to(comm.device).requires_grad_()
        out = call(received, **mine)
        assert_bits_equal(out.detach(), every[comm.rank], "gathered")
        out.backward(out.detach() * 3)
        assert_bits_equal(received.grad, want * 3, "what came, sent there again")


def expert_layer(x: torch.Tensor, **mine: torch.Tensor) -> torch.Tensor:
    received = ops.global_scatter(x * 2, **mine)
    return ops.global_gather(torch.relu(received) + 1, **mine)


def compiled(comm: Any, backend: str) -> None:
    """One graph for any counts; the compiled result is eager's, bit for bit."""
    graph = compile_whole(expert_layer, backend=backend)
    for seed in range(2):
        counts = drawn(comm.size, 2, 3 + seed, seed)
        mine = own_counts(comm, counts)
        x = inputs(counts, 4, torch.float32)[comm.rank].to(comm.device)
        assert_bits_equal(graph(x, **mine), expert_layer(x, **mine), f"compiled {backend}")


def test_compiled(ranks: Ranks) -> None:
    ranks(compiled, "aot_eager")


def test_generated_code(unified_ranks: Ranks) -> None:
    generating(unified_ranks)(compiled, "inductor", deadline=240)


def replicated(comm: Any, whole: torch.Tensor, counts: Counts) -> torch.Tensor:
    """A function of all ranks' rows that is the same on every rank.

    Each takes its own rows, and ``identity`` adds up their gradients; the sum over the ranks with
    an identity gradient makes one result of theirs.
    """
    lengths = [sum(map(sum, splits)) for splits in counts]
    x = ops.identity(whole).split(lengths)[comm.rank]
    mine = own_counts(comm, counts)
    received = ops.global_scatter(x, **mine)
    weights = torch.linspace(1, 2 + comm.rank, max(received.numel(), 1), dtype=torch.float64)
    received = received * weights[: received.numel()].view(received.shape).to(whole.device)
    back = ops.global_gather(received.sin(), **mine)
    total: torch.Tensor = ops.all_reduce(back.cos().sum(), backward="identity")
    return total


@runs_on("ranks")
def test_gradcheck(comm: Any) -> None:
    counts = drawn(comm.size, 2, 2, 4)
    all_rows = torch.cat(inputs(counts, 2, torch.float64)).to(comm.device).requires_grad_()
    torch.autograd.gradcheck(lambda x: replicated(comm, x, counts), all_rows)


@runs_on("ranks", deadline=120)
def test_opcheck(comm: Any) -> None:
    counts = drawn(comm.size, 2, 3, 6)
    mine = list(own_counts(comm, counts).values())
    x = inputs(counts, 2, torch.float64)[comm.rank].to(comm.device)
    table = torch.tensor(counts)
    operators = torch.ops.commlib
    torch.library.opcheck(operators.agreed_counts.default, (x, *mine, 0, comm.size, False))
    received = ops.global_scatter(x, *mine)
    for rows in (x, x.clone().requires_grad_()):
        torch.library.opcheck(operators.to_experts.default, (rows, table, 0, True, len(received)))
    for rows in (received, received.clone().requires_grad_()):
        torch.library.opcheck(operators.from_experts.default, (rows, table, 0, True, len(x)))


@runs_on("all_gpu_ranks")
def test_captured(comm: Any) -> None:
    """The counts are a part of the graph; rows are not."""
    counts = drawn(comm.size, 2, 40, 2)
    mine, every = own_counts(comm, counts), inputs(counts, 16, torch.bfloat16)
    x = every[comm.rank].to(comm.device)
    expert_layer(x, **mine)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = expert_layer(x, **mine)
    for seed in range(3):
        x.copy_(sample(comm.rank, tuple(x.shape), torch.bfloat16, seed))
        graph.replay()
        assert_bits_equal(out, expert_layer(x, **mine), f"replay {seed}")
    device_counts = own_counts(comm, counts, comm.device)
    with (
        raises(ArgumentError, "local_count.cpu() before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        ops.global_scatter(x, **device_counts)


@runs_on("cpu_ranks")
def test_captured_on_a_cpu(comm: Any) -> None:
    """A captured function raises instead of keeping the counts of the first call."""
    counts = drawn(comm.size, 2, 4, 2)
    mine = own_counts(comm, counts)
    x = inputs(counts, 2, torch.float32)[comm.rank]
    received = ops.global_scatter(x, **mine)
    for call, rows in ((ops.global_scatter, x), (ops.global_gather, received)):
        captured: Any = graph.capture(call)
        with raises(ArgumentError, call.__name__, "local_count is on cpu", "pass capacity="):
            captured(rows, **mine)
        call(rows, **mine)  # the ring is still usable


@runs_on("ranks")
def test_mismatches(comm: Any) -> None:
    """Ranks that disagree are notified on every rank, by name, and nothing is launched."""
    counts = [[[1, 2], [3, 0]], [[2, 1], [1, 2]]]
    x = inputs(counts, 3, torch.float32)[comm.rank].to(comm.device)
    mine = own_counts(comm, counts)
    before = calls(comm)
    wrong = {name: n.clone() for name, n in mine.items()}
    if comm.rank == 1:
        wrong["global_count"][0] += 1  # rank 0 sends 3 rows to rank 1's expert 0
    words = ("rank 0 has 3 rows for expert 0 of rank 1", "rank 1 expects 4", "global_count = ops")
    with raises(ArgumentError, *words):
        ops.global_scatter(x, **wrong)
    with raises(ArgumentError, "width of x: 3 on ranks [0], 2 on ranks [1]"):
        ops.global_scatter(x[:, : 3 - comm.rank], **mine)
    with raises(DtypeError, "dtype of x: torch.float32 on ranks [0], torch.float64"):
        ops.global_scatter(x.double() if comm.rank else x, **mine)
    one = own_counts(comm, [[[3], [3]], [[4], [2]]])
    with raises(ShapeError, "number of counts: 8 on ranks [0], 4 on ranks [1]"):
        ops.global_scatter(x, **(one if comm.rank else mine))
    reason = (
        (ArgumentError, "invalid arguments on ranks [0]")
        if comm.rank
        else (ShapeError, "adds up to")
    )
    with raises(*reason):
        ops.global_scatter(x if comm.rank else x[:-1], **mine)
    with raises(ArgumentError, f"ranks [{1 - comm.rank}]", "another operator"):
        (ops.global_gather if comm.rank else ops.global_scatter)(x, **mine)
    assert_equal(calls(comm), before, "calls launched by refused ones")
    both_ways(comm, counts, 3, torch.float32)


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    counts = [[[1, 2], [3, 0]], [[2, 1], [1, 2]]]
    x = inputs(counts, 3, torch.float32)[comm.rank].to(comm.device)
    mine, before = own_counts(comm, counts), calls(comm)
    local, expected = mine.values()
    for call, verb in ((ops.global_scatter, "global_scatter"), (ops.global_gather, "global_gath")):
        with raises(DtypeError, verb, "local_count is torch.int32", "pass local_count.long()"):
            call(x, local.int(), expected)
        with raises(ArgumentError, "global_count[1] is -1"):
            call(x, local, torch.tensor([1, -1, 2, 2]))
        with raises(ArgumentError, "local_count is list"):
            call(x, [1, 2, 3, 4], expected)
        with raises(ShapeError, "shape (3,)", "[experts * 2]"):
            call(x, local[:3], expected)
        with raises(ShapeError, "local_count has 4", "2"):
            call(x, local, expected[:2])
        with raises(ShapeError, "adds up to", tuple(x[1:].shape)):
            call(x[1:], local, expected)
        with raises(ShapeError, "[rows, width]"):
            call(x.view(-1), local, expected)
        with raises(DeviceError, "meta"):
            call(x.to("meta"), local, expected)
        with raises(ArgumentError, "list"):
            call([1.0], local, expected)
        with raises(RingError, ABSENT_RING):
            call(x, local, expected, ABSENT_RING)
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_a_ring_of_one(comm: Any) -> None:
    ring = commlib.new_ring(70 + comm.rank, [comm.rank])
    assert ring is not None
    x = sample(1, (5, 2), torch.float32).to(comm.device).requires_grad_()
    counts = torch.tensor([3, 2])
    received = ops.global_scatter(x, counts, counts, ring.ring_id)
    assert_bits_equal(received.detach(), x.detach(), "a ring of one")
    ops.global_gather(received, counts, counts, ring.ring_id).sum().backward()
    assert_bits_equal(x.grad, torch.ones(5, 2), "its gradient")
    commlib.CommContextManager.instance().close(ring.ring_id)


@runs_on("many_ranks")
def test_a_sender_that_is_ahead(comm: Any) -> None:
    """A rank that nobody makes wait is a call ahead of its receiver, whose flags must not mix."""
    slow, quick, target = 0, 1, 2
    size, rows, width = comm.size, 64, 512

    def counts(sender: int) -> Counts:
        return [[[rows * (a == sender and b == target)] for b in range(size)] for a in range(size)]

    for turn in range(5):
        received = []
        for sender in (slow, quick):
            x = torch.full((rows if comm.rank == sender else 0, width), turn + sender / 2)
            x = x.to(comm.device)
            if comm.rank == slow == sender and comm.device.type == "cuda":
                torch.cuda._sleep(100_000_000)
            received.append(ops.global_scatter(x, **own_counts(comm, counts(sender))))
        for sender, rows_found in zip((slow, quick), received, strict=True):
            wanted = torch.full((rows if comm.rank == target else 0, width), turn + sender / 2)
            assert_bits_equal(rows_found, wanted, f"turn {turn}, from rank {sender}")
