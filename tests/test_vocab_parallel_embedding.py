"""ops.vocab_parallel_embedding: rows of the own shard of a table, zeros for the other ids."""

from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from commlib import ops
from commlib.errors import ArgumentError, DtypeError, ShapeError
from tests.support.checks import Array, assert_bits_equal, bits, from_bits, raises, sample
from tests.support.operator import compile_whole
from tests.support.runs_on import runs_on

ROWS, DIM = 6, 3


def rows_of_shard(ids: Array, table: Array, start: int) -> Array:
    """Out[..., :] = W[id - start] where start <= id < start + rows, else 0."""
    inside = (ids >= start) & (ids < start + ROWS)
    rows = table[np.where(inside, ids, start)]
    rows[~inside] = 0
    return rows


def ids_on(comm: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Draw ids of the whole vocabulary, the same on every rank."""
    drawn = np.random.default_rng(4).integers(0, ROWS * comm.size, shape)
    return torch.from_numpy(np.asarray(drawn)).to(dtype).to(comm.device)


@runs_on("ranks")
def test_values(comm: Any) -> None:
    """The own rows' bits, for ids of any shape; the sum over the ranks is the whole lookup."""
    start = comm.rank * ROWS
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        table = sample(0, (ROWS * comm.size, DIM), dtype)
        shard = table[start : start + ROWS].to(comm.device)
        for kind in (torch.int32, torch.int64):
            for shape in ((4, 7), (1,), (), (0,), (0, 2)):
                ids = ids_on(comm, kind, shape)
                want = from_bits(rows_of_shard(ids.cpu().numpy(), bits(table), start), dtype)
                actual = ops.vocab_parallel_embedding(ids, shard, start)
                assert_bits_equal(actual, want, f"{dtype} {kind} {shape}")
                complete = from_bits(bits(table)[ids.cpu().numpy()], dtype)
                assert_bits_equal(
                    ops.all_reduce(actual), complete, f"sum of {dtype} {kind} {shape}"
                )


@runs_on("ranks")
def test_compiled(comm: Any) -> None:
    """One graph for any number of ids gives eager's bits."""
    start = comm.rank * ROWS
    graph = compile_whole(ops.vocab_parallel_embedding, dynamic=True)
    shard = sample(comm.rank, (ROWS, DIM), torch.float32).to(comm.device)
    for shape in ((4, 7), (9, 2), (3, 3)):
        ids = ids_on(comm, torch.int64, shape)
        want = ops.vocab_parallel_embedding(ids, shard, start)
        assert_bits_equal(graph(ids, shard, start), want, shape)


@runs_on("ranks")
def test_gradient(comm: Any) -> None:
    """The gradient is a scatter-add into the own rows.

    Weights are small integers, so that the order in which repeated ids are added does not count.
    """
    start = comm.rank * ROWS
    table = sample(0, (ROWS * comm.size, DIM), torch.float64)
    ids = ids_on(comm, torch.int64, (5, 8))
    weights = torch.arange(5.0 * 8 * DIM, dtype=torch.float64).view(5, 8, DIM)
    want = np.zeros((ROWS * comm.size, DIM))
    np.add.at(want, ids.cpu().numpy(), weights.numpy())
    for call in (ops.vocab_parallel_embedding, compile_whole(ops.vocab_parallel_embedding)):
        shard = table[start : start + ROWS].to(comm.device).requires_grad_()
        call(ids, shard, start).backward(weights.to(comm.device))
        assert_bits_equal(shard.grad, want[start : start + ROWS], "gradient")


@runs_on("ranks")
def test_shards_beyond_32_bits(comm: Any) -> None:
    """An id of 32 bits is in no shard that begins at 2**32 or later, eager and compiled."""
    weight = sample(comm.rank, (ROWS, DIM), torch.float32).to(comm.device)
    ids = ids_on(comm, torch.int32, (8,))
    far = ids.long() + 2**32
    for call in (ops.vocab_parallel_embedding, compile_whole(ops.vocab_parallel_embedding)):
        for start in (2**32, 2**33, 2**63 - 1):
            assert_bits_equal(call(ids, weight, start), torch.zeros(8, DIM), start)
        want = call(ids, weight, 3)
        assert_bits_equal(call(far, weight, 2**32 + 3), want, "ids of 64 bits")
    assert_bits_equal(
        ops.vocab_parallel_embedding(ids, weight, np.int64(3)), want, "a number of NumPy"
    )


@runs_on("ranks")
def test_symbolic_start(comm: Any) -> None:
    """A trace may pass a number that depends on a shape, also one beyond 32 bits."""

    def second_half(ids: torch.Tensor, table: torch.Tensor, skipped: int) -> torch.Tensor:
        half = table.shape[0] // 2
        return ops.vocab_parallel_embedding(ids, table[half:], half + skipped, vocab_size=2 * half)

    ids = ids_on(comm, torch.int32, (8,)) // comm.size
    table = sample(0, (ROWS, DIM), torch.float32).to(comm.device)
    inside = (ids >= ROWS // 2)[:, None]
    for skipped, want in ((0, torch.where(inside, table[ids], 0)), (2**32, torch.zeros(8, DIM))):
        traced = make_fx(second_half, tracing_mode="symbolic")(ids, table, skipped)
        assert_bits_equal(traced(ids, table, skipped), want, f"make_fx {skipped}")
        graph = compile_whole(second_half, dynamic=True)
        assert_bits_equal(graph(ids, table, skipped), want, f"compiled {skipped}")


@runs_on("ranks")
def test_strided(comm: Any) -> None:
    """Transposed ids and a transposed, stepped table count with their values."""
    table = sample(1, (DIM, 2 * ROWS), torch.float32).to(comm.device)
    ids = ids_on(comm, torch.int64, (4, 7))
    for shard in (table.t()[::2], table[:, :ROWS].t()):
        want = ops.vocab_parallel_embedding(ids.t().contiguous(), shard.contiguous(), ROWS)
        assert_bits_equal(ops.vocab_parallel_embedding(ids.t(), shard, ROWS), want)


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    lookup = ops.vocab_parallel_embedding
    ids = torch.tensor([0, 3, 12], device=comm.device)
    weight = torch.zeros(ROWS, DIM, device=comm.device)
    with raises(ArgumentError, "start_index=tensor", "the operator takes no ring"):
        lookup(ids, weight, torch.ones(2))
    with raises(ArgumentError, "start_index=-1"):
        lookup(ids, weight, -1)
    for start in (1.5, True, None, "1", 2**63):
        with raises(ArgumentError, f"start_index={start!r}", "a whole number from 0"):
            lookup(ids, weight, start)
    for size in ("x", 1.5, None, False):
        with raises(ArgumentError, f"vocab_size={size!r}", "a whole number"):
            lookup(ids, weight, vocab_size=size)
    with raises(ArgumentError, "ids is list; expected a torch.Tensor"):
        lookup([0, 3], weight)
    with raises(ArgumentError, "weight is NoneType; expected a torch.Tensor"):
        lookup(ids, None)
    with raises(ArgumentError, "0 to 12", "0 to 11"):
        lookup(ids, weight, vocab_size=12)
    with raises(ArgumentError, "-1 to 12"):
        lookup(torch.tensor([-1, 12], device=comm.device), weight, vocab_size=13)
    with raises(DtypeError, "float32", "long"):
        lookup(ids.float(), weight)
    for shape in ((ROWS,), (0, DIM), (ROWS, 0), (1, ROWS, DIM)):
        with raises(ShapeError, shape, "[rows, dim]"):
            lookup(ids, torch.zeros(shape, device=comm.device))
    assert_bits_equal(lookup(ids, weight, vocab_size=13), torch.zeros(3, DIM), "ids at the bounds")
    assert_bits_equal(
        lookup(ids - 5, weight), torch.zeros(3, DIM), "unchecked ids below 0 give zeros"
    )
