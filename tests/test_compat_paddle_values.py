"""compat.paddle: values, messages and gradients of every operator."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from commlib import graph
from commlib.compat import paddle
from commlib.errors import (
    ArgumentError,
    ShapeError,
)
from tests.support.checks import (
    Array,
    assert_bits_equal,
    assert_equal,
    bits,
    from_bits,
    laid_out,
    raises,
    rounded,
    sample,
    wide,
)
from tests.support.formulas import (
    ROOT,
    from_root,
    joined,
    largest,
    own,
    own_columns,
    own_part_of_total,
    parts_for_rank,
    product,
    side_by_side,
    smallest,
    total,
)
from tests.support.runs_on import runs_on
from tests.test_compat_paddle import ELSEWHERE, SIGNATURES, Tensor, X, ordered

# -- values ----------------------------------------------------------------------------------------

REDUCED = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
MOVED = (*REDUCED, torch.complex64, torch.float8_e4m3fn, torch.int8)
EVEN = [(4, 6), (2,), (0,), (0, 4), (2, 3, 2)]


@dataclass(frozen=True)
class Case:
    """One name: its call with every legacy argument in place, and what it means in NumPy."""

    call: Callable[[Tensor, Any, bool], Tensor]
    formula: Callable[[list[Array], int], Array]
    reduces: bool = False
    also: tuple[tuple[int, ...], ...] = ()


def at_root(op: Callable[[list[Array], int], Array]) -> Callable[[list[Array], int], Array]:
    return lambda inputs, rank: op(inputs, rank) if rank == ROOT else inputs[rank]


def rows_from_root(inputs: list[Array], rank: int) -> Array:
    """The part of the rank; what is left of the rows goes to nobody."""
    rows = len(inputs[ROOT]) // len(inputs)
    return inputs[ROOT][rank * rows : (rank + 1) * rows]


ANY = ((3, 5), (), (1, 7))
CASES = {
    "alltoall": Case(lambda x, c, s: paddle.alltoall(x, 0, s), parts_for_rank),
    "c_allgather": Case(lambda x, c, s: paddle.c_allgather(x, 0, c.size, s), joined, also=ANY),
    "c_allreduce_max": Case(
        lambda x, c, s: paddle.c_allreduce_max(x, 0, s, True), largest, True, ANY
    ),
    "c_allreduce_min": Case(
        lambda x, c, s: paddle.c_allreduce_min(x, 0, s, True), smallest, True, ANY
    ),
    "c_allreduce_prod": Case(
        lambda x, c, s: paddle.c_allreduce_prod(x, 0, s, True), product, True, ANY
    ),
    "c_allreduce_sum": Case(
        lambda x, c, s: paddle.c_allreduce_sum(x, 0, s, True), total, True, ANY
    ),
    "c_broadcast": Case(lambda x, c, s: paddle.c_broadcast(x, 0, ROOT, s), from_root, also=ANY),
    "c_concat": Case(lambda x, c, s: paddle.c_concat(x, c.rank, c.size, 0, s, False), side_by_side),
    "c_identity": Case(lambda x, c, s: paddle.c_identity(x, 0, s, False), own, also=ANY),
    "c_reduce_max": Case(
        lambda x, c, s: paddle.c_reduce_max(x, 0, ROOT, s), at_root(largest), True, ANY
    ),
    "c_reduce_min": Case(
        lambda x, c, s: paddle.c_reduce_min(x, 0, ROOT, s), at_root(smallest), True, ANY
    ),
    "c_reduce_prod": Case(
        lambda x, c, s: paddle.c_reduce_prod(x, 0, ROOT, s), at_root(product), True, ANY
    ),
    "c_reduce_sum": Case(
        lambda x, c, s: paddle.c_reduce_sum(x, 0, ROOT, s), at_root(total), True, ANY
    ),
    "c_reducescatter": Case(
        lambda x, c, s: paddle.c_reducescatter(x, 0, c.size, s), own_part_of_total, True
    ),
    "c_scatter": Case(
        lambda x, c, s: paddle.c_scatter(x, 0, ROOT, c.size, s),
        rows_from_root,
        also=((5, 6), (1, 3), (3,)),
    ),
    "c_split": Case(lambda x, c, s: paddle.c_split(x, c.rank, c.size, 0, s, False), own_columns),
    "mp_allreduce_sum": Case(lambda x, c, s: paddle.mp_allreduce_sum(x, 0, s), total, True, ANY),
}


@pytest.mark.parametrize("name", CASES)
@runs_on("ranks")
def test_values(comm: Any, name: str) -> None:
    """Every shape, dtype, stride and stream gives the bits of the formula; x stays as it was."""
    case = CASES[name]
    encode, decode = (wide, rounded) if case.reduces else (bits, from_bits)
    for dtype in REDUCED if case.reduces else MOVED:
        for shape in (*EVEN, *case.also):
            inputs = [sample(rank, shape, dtype) for rank in range(comm.size)]
            want = decode(case.formula([encode(x) for x in inputs], comm.rank), dtype)
            for layout in ("contiguous", "transposed"):
                for calc in (False, True):
                    x = laid_out(inputs[comm.rank], layout, comm.device)
                    actual = ordered(case.call, x, comm, calc)
                    assert_bits_equal(actual, want, f"{dtype} {shape} {layout} {calc}")
                    assert_bits_equal(x, inputs[comm.rank], f"input of {dtype} {shape} afterwards")


def test_every_operator_has_a_case() -> None:
    others = {n for n, arguments in SIGNATURES.items() if X not in arguments}
    assert set(CASES) == set(SIGNATURES) - others - {"c_embedding", "send_v2"} - ELSEWHERE


@runs_on("ranks")
def test_scatter_drops_what_does_not_divide(comm: Any) -> None:
    """c_scatter of five rows over two ranks: two rows each, the fifth goes to nobody."""
    x = torch.arange(30.0, device=comm.device).view(5, 6) + 100 * comm.rank
    want = (torch.arange(30.0).view(5, 6) + 100)[2 * comm.rank : 2 * comm.rank + 2]
    assert_bits_equal(ordered(paddle.c_scatter, x, root=1, nranks=2), want)


@runs_on("ranks")
def test_embedding(comm: Any) -> None:
    """Own rows for own ids, zeros for the rest; the sum over the ring is the whole look-up."""
    table = np.random.default_rng(1).standard_normal((8, 3))
    ids = np.array([[0, 3, 4], [7, 7, 1]])
    shard = torch.from_numpy(table[4 * comm.rank :][:4]).to(comm.device)
    for dtype in (torch.int32, torch.int64):
        x = torch.from_numpy(ids).to(comm.device, dtype)
        rows = paddle.c_embedding(shard, x, 4 * comm.rank, 8)
        mine = (ids // 4 == comm.rank)[..., None]
        assert_bits_equal(rows, np.where(mine, table[ids], 0.0), "own rows")
        assert_bits_equal(ordered(paddle.mp_allreduce_sum, rows), table[ids], "all rows")
    strange = torch.tensor([-1, 8, 100], device=comm.device)
    assert_bits_equal(
        paddle.c_embedding(shard, strange, 4 * comm.rank), np.zeros((3, 3)), "ids of no rank"
    )
    with raises(ArgumentError, -1, 100, 7):
        paddle.c_embedding(shard, strange, 4 * comm.rank, vocab_size=8)


# -- send_v2 and recv_v2 ---------------------------------------------------------------------------


def passed_on(comm: Any, x: Tensor, **how: Any) -> Tensor:
    """Send ``x`` from rank 1 to rank 0, then from rank 0 to rank 1; return what has come."""
    peer = 1 - comm.rank
    shape, dtype = how.pop("out_shape"), how.pop("dtype")

    def exchange() -> Tensor:
        if comm.rank == 1:
            paddle.send_v2(x, peer=peer, **how)
        got = paddle.recv_v2(shape, dtype, peer, **how)
        if comm.rank == 0:
            paddle.send_v2(x, 0, peer, **how)
        return got

    return ordered(exchange)


KINDS: list[tuple[Any, torch.dtype]] = [
    *((dtype, dtype) for dtype in MOVED),
    (5, torch.float32),
    (0, torch.bool),
    (22, torch.bfloat16),
    ("float64", torch.float64),
    ("int64", torch.int64),
]


@runs_on("ranks")
def test_point_to_point(comm: Any) -> None:
    """The peer's bits arrive, however the dtype is spelled, with the shape given or sent along."""
    for dtype_arg, dtype in KINDS:
        for calc in (False, True):
            x, want = (sample(r, (3, 2), dtype) for r in (comm.rank, 1 - comm.rank))
            label = f"{dtype_arg!r} {calc}"
            x = laid_out(x, "transposed", comm.device)
            got = passed_on(comm, x, out_shape=[3, 2], dtype=dtype_arg, use_calc_stream=calc)
            assert_bits_equal(got, want, label)
    for shape in ((), (4,), (0,), (2, 0, 3), (1,) * 9, (2, 3, 4)):
        for calc in (False, True):
            mine, theirs = ((*shape, 1 + r) for r in (comm.rank, 1 - comm.rank))
            x = sample(comm.rank, mine, torch.float16).to(comm.device)
            kwargs = {"use_calc_stream": calc, "dynamic_shape": True}
            got = passed_on(comm, x, out_shape=(), dtype="float16", **kwargs)
            assert_bits_equal(
                got, sample(1 - comm.rank, theirs, torch.float16), f"dynamic {shape} {calc}"
            )
    scalar = torch.tensor(float(comm.rank), device=comm.device)
    got = passed_on(comm, scalar, out_shape=(), dtype=5, dynamic_shape=True)
    assert_bits_equal(got, torch.tensor(1.0 - comm.rank), "dynamic 0-D")
    assert_equal(got.device, comm.device, "device")


@runs_on("ranks")
def test_dynamic_shape_on_the_wire(comm: Any) -> None:
    """A dynamic shape is int32 ndim, int32 dims, then the data: what upstream peers expect."""
    if comm.rank == 0:
        paddle.send_v2(torch.ones(2, 3, device=comm.device), 0, 1, True, True)
        paddle.send_v2(torch.tensor([65], dtype=torch.int32, device=comm.device), 0, 1, True)
        return
    said = [paddle.recv_v2([n], "int32", 0, 0, True).tolist() for n in (1, 2)]
    assert_equal(said, [[2], [2, 3]], "header")
    assert_bits_equal(paddle.recv_v2([2, 3], 5, 0, 0, True), np.ones((2, 3)), "data")
    with raises(ShapeError, 65, "rank 0", "dynamic_shape=True"):
        paddle.recv_v2(peer=0, dynamic_shape=True)


@runs_on("cpu_ranks")
def test_dynamic_shape_in_a_captured_function(comm: Any) -> None:
    """Both sides raise: a replay would keep the shape of the first call."""
    peer, x = 1 - comm.rank, torch.ones(3)
    dynamic: Any = {"use_calc_stream": True, "dynamic_shape": True}

    def passed(x: Tensor) -> Tensor:
        if comm.rank == 0:
            paddle.send_v2(x, 0, peer, **dynamic)
            return x
        return paddle.recv_v2(peer=peer, **dynamic)

    assert_bits_equal(passed(x), x, "eager")
    with raises(ArgumentError, "dynamic_shape=True inside a capture", "dynamic_shape=False"):
        graph.capture(passed)(x)
    assert_bits_equal(passed(x), x, "eager after it")


# -- gradients -------------------------------------------------------------------------------------


def gradient(call: Callable[..., Tensor], x: Tensor, weights: Tensor, *arguments: Any) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    call(leaf, *arguments).backward(weights)
    assert leaf.grad is not None
    return leaf.grad


@runs_on("ranks")
def test_gradients(comm: Any) -> None:
    """mp_allreduce_sum: identity; c_identity: sum; c_concat: own part; c_split: concat."""
    r, n = comm.rank, comm.size
    for shape in ((4, 6), (6,), (2, 3, 4)):
        x = sample(r, shape, torch.float64).to(comm.device)
        drawn = [sample(q, shape, torch.float64, seed=5).numpy() for q in range(n)]
        weights = torch.from_numpy(drawn[r]).to(comm.device)
        for calc in (False, True):
            got = gradient(paddle.mp_allreduce_sum, x, weights, 0, calc)
            assert_bits_equal(got, drawn[r], f"mp_allreduce_sum {shape} {calc}")
            got = gradient(paddle.c_identity, x, weights, 0, calc)
            assert_bits_equal(got, drawn[0] + drawn[1], f"c_identity {shape} {calc}")

            wide_weights = torch.cat([weights, 2 * weights], -1)
            got = gradient(paddle.c_concat, x, wide_weights, r, n, 0, calc)
            assert_bits_equal(got, (1 + r) * drawn[r], f"c_concat {shape} {calc}")

            half = weights.tensor_split(2, -1)[0].contiguous()
            halves = [np.split(w, 2, -1)[0] for w in drawn]
            got = gradient(paddle.c_split, x, half, r, n, 0, calc)
            assert_bits_equal(got, np.concatenate(halves, -1), f"c_split {shape} {calc}")

            def upstream(x: Tensor, calc: bool = calc) -> Tensor:
                return paddle.c_split(x, r, n, 0, calc, legacy_grad=True)

            assert_bits_equal(upstream(x), np.split(x.cpu().numpy(), n, -1)[r], "forward")
            want = np.concatenate(halves, 0).reshape(shape)
            assert_bits_equal(gradient(upstream, x, half), want, f"c_split upstream {shape} {calc}")


@runs_on("ranks")
def test_embedding_gradient(comm: Any) -> None:
    """Rows that were used add up; ids of other ranks leave no trace."""
    weight = torch.zeros(4, 3, dtype=torch.float64, device=comm.device)
    ids = torch.tensor([[0, 5, 5], [4, 7, 3]], device=comm.device)
    weights = sample(0, (2, 3, 3), torch.float64)
    want = np.zeros((4, 3))
    for index, one in np.ndenumerate(ids.cpu().numpy()):
        if one // 4 == comm.rank:
            want[one % 4] += weights[index].numpy()
    start = 4 * comm.rank
    got = gradient(paddle.c_embedding, weight, weights.to(comm.device), ids, start)
    assert_bits_equal(got, want, "scatter-add", atol=1e-12)


@runs_on("ranks")
def test_other_operators_have_no_gradient(comm: Any) -> None:
    """Operators without a gradient in Paddle cut it; the raw form stays raw for a parameter too."""
    for name in sorted(set(CASES) - {"mp_allreduce_sum", "c_identity", "c_concat", "c_split"}):
        x = torch.ones(4, 6, device=comm.device, requires_grad=True)
        result = ordered(CASES[name].call, x, comm, False)
        assert_equal(result.requires_grad, False, name)
    x = torch.ones(2, device=comm.device, requires_grad=True)
    got = passed_on(comm, x, out_shape=[2], dtype=5)
    assert_equal(got.requires_grad, False, "recv_v2")
