"""compat.paddle: tokens go to the rows of their experts and back, as loops over them say."""

from typing import Any

import numpy as np
import pytest
import torch

from commlib import graph
from commlib.compat import paddle
from commlib.errors import ArgumentError, DtypeError, ShapeError
from tests.support.checks import Array, assert_bits_equal, assert_equal, raises, sample, wide
from tests.support.runs_on import runs_on

Tensor = torch.Tensor
TOKENS, HIDDEN, EXPERTS = 7, 3, 4


def gate() -> tuple[Tensor, Tensor]:
    """Return tokens and the probabilities of their experts; two tokens have ties."""
    x = sample(0, (TOKENS, HIDDEN), torch.float32)
    logits = sample(0, (TOKENS, EXPERTS), torch.float32, seed=1).softmax(1)
    logits[2] = logits[5] = 0.25
    return x, logits


def dispatched(
    x: Array, scores: Array, gate: Array, k: int, capacity: int, padded: bool
) -> tuple[Array, Array, Array, list[int], Array]:
    """Return the operator's five results, by a loop over experts, choices and tokens."""
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(gate, chosen, 1)
    index = np.zeros((k, len(x)), int)
    y = np.zeros((EXPERTS * capacity if padded else len(x) * k, x.shape[1]))
    ends: list[int] = []
    for expert in range(EXPERTS):
        start = ends[-1] if ends else 0
        pairs = [(t, c) for t in range(len(x)) for c in range(k) if chosen[t, c] == expert]
        if padded:
            pairs.sort(key=lambda pair: pair[1])
        for slot, (token, choice) in enumerate(pairs):
            row = expert * capacity + slot if padded else start + slot
            if slot < capacity:
                y[row], index[choice, token] = x[token], row
            else:
                weights[token, choice] = 0
        ends.append(start + len(pairs))
    return y, weights, index, ends, chosen


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "packed"])
@pytest.mark.parametrize(("k", "capacity"), [(1, 2), (2, 3), (3, 9), (4, 1)])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_dispatch(padded: bool, k: int, capacity: int, biased: bool) -> None:
    """All results are those of the loop; combining the rows gives weighted tokens back."""
    x, logits = gate()
    bias = torch.tensor([0.3, 0.0, -0.2, 0.1]) if biased else None
    scores = wide(logits if bias is None else logits + bias)
    y, weights, index, ends, chosen = paddle.moe_gate_dispatch(x, logits, bias, k, capacity, padded)
    want = dispatched(wide(x), scores, wide(logits), k, capacity, padded)
    for got, formula in zip((y, weights, index, ends, chosen), want, strict=True):
        assert_equal(got.tolist(), np.asarray(formula, dtype=wide(got).dtype).tolist())
    assert_equal(
        [one.dtype for one in (index, ends, chosen)], [torch.int32, torch.int64, torch.int32]
    )

    back = paddle.moe_combine(y, weights, index.t())
    factors = want[1].sum(1, keepdims=True)
    np.testing.assert_allclose(wide(back), wide(x) * factors, rtol=1e-6)  # a sum of products


def test_gradients_of_dispatch_and_combine() -> None:
    """Dropped tokens get no gradient; the others that of their weights."""
    x, logits = (one.requires_grad_() for one in gate())
    y, weights, index, *_ = paddle.moe_gate_dispatch(x, logits, None, 2, 2)
    by = sample(0, tuple(y.shape), torch.float32, seed=2)
    combined = paddle.moe_combine(y * by, weights, index.t())
    combined.sum().backward()
    rows, mask = index.t().long(), (weights > 0).float().detach()
    assert (mask == 0).any()
    slope = (by[rows] * weights.detach()[..., None]).sum(1)
    np.testing.assert_allclose(wide(x.grad), wide(slope), rtol=1e-5)
    terms = (x.detach()[:, None] * by[rows]).sum(-1) * mask
    expected = torch.zeros(TOKENS, EXPERTS)
    chosen = paddle.moe_gate_dispatch(x, logits, None, 2, 2)[-1].long()
    np.testing.assert_allclose(
        wide(logits.grad),
        wide(expected.scatter(1, chosen, terms)),
        rtol=1e-5,
        atol=1e-6,
    )


ROUTES = torch.tensor([[0, 2], [2, -1], [3, 0], [-1, -1], [0, 3], [2, 0]], dtype=torch.int32)
COUNTS = [4, 0, 3, 2]


def permuted(values: Array, alignment: int) -> tuple[Array, Array]:
    """Return the rows and the map of rows, by a loop over experts and tokens."""
    row_map, rows = np.full((len(ROUTES), EXPERTS), -1), list[Array]()
    for expert in range(EXPERTS):
        for token, routes in enumerate(ROUTES.tolist()):
            if expert in routes:
                row_map[token, expert] = len(rows)
                rows.append(values[token, routes.index(expert)])
        rows += [np.zeros_like(values[0, 0])] * (-len(rows) % alignment)
    return np.array(rows), row_map


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_permute(alignment: int, dtype: torch.dtype) -> None:
    """Rows, map, probabilities and scales are those of the loop, and come back as they went."""
    x = sample(0, (len(ROUTES), HIDDEN), dtype).requires_grad_()
    scale = sample(0, (len(ROUTES), 2), torch.float32, seed=1)
    chances = sample(0, tuple(ROUTES.shape), torch.float32, seed=2).abs().requires_grad_()
    arguments = (scale, ROUTES, chances, EXPERTS, COUNTS, alignment)
    rows, row_map, probabilities, scales, indices = paddle.moe_permute(x, *arguments)

    def twice(values: Tensor) -> Array:
        return np.repeat(wide(values)[:, None], ROUTES.shape[1], axis=1)

    want, wanted_map = permuted(twice(x), alignment)
    assert scales is not None and indices.shape == (0,)
    assert_equal(row_map.tolist(), wanted_map.tolist())
    assert_equal(wide(rows).tolist(), want.tolist())
    assert_equal(wide(scales).tolist(), permuted(twice(scale), alignment)[0].tolist())
    chances_at = permuted(wide(chances)[..., None], alignment)[0][:, 0]
    assert_equal(wide(probabilities).tolist(), chances_at.tolist())

    back, again = paddle.moe_unpermute(rows, row_map, ROUTES, probabilities, len(ROUTES), EXPERTS)
    routes = (ROUTES >= 0).numpy()
    assert_equal(wide(back).tolist(), (wide(x) * routes.sum(1, keepdims=True)).tolist())
    assert_equal(wide(again).tolist(), (wide(chances) * routes).tolist())
    (back.float().sum() + 2 * again.sum()).backward()
    assert x.grad is not None and chances.grad is not None
    assert_equal(wide(x.grad).tolist(), np.repeat(routes.sum(1)[:, None], HIDDEN, 1).tolist())
    assert_equal(chances.grad.tolist(), (2.0 * routes).tolist())


@runs_on("cpu_ranks")
def test_captured_on_a_cpu(comm: Any) -> None:
    """Replays place the tokens by their own routes."""
    scale = chances = torch.ones(ROUTES.shape)

    def moved(x: Tensor, routes: Tensor) -> Any:
        rows, row_map, *_ = paddle.moe_permute(x, scale, routes, chances, EXPERTS, COUNTS, 4)
        return rows, row_map

    captured = graph.capture(moved, outputs="copy")
    for seed in range(4):
        x = sample(comm.rank, (len(ROUTES), HIDDEN), torch.float32, seed)
        routes = ROUTES.roll(seed, 0)
        for got, want in zip(captured(x, routes), moved(x, routes), strict=True):
            assert_bits_equal(got, want, f"replay {seed}")
    assert_equal([row["eager"] for row in graph.report(captured)], [None], "captured, not eager")


def test_permute_of_bytes() -> None:
    """Float8 rows are those of the same numbers in float32."""
    numbers = torch.arange(1.0, len(ROUTES) + 1)[:, None].expand(-1, HIDDEN)
    chances = torch.ones(ROUTES.shape)
    arguments = (None, ROUTES, chances, EXPERTS, COUNTS, 4)
    rows, *_ = paddle.moe_permute(numbers.to(torch.float8_e4m3fn), *arguments)
    want, *_ = paddle.moe_permute(numbers, *arguments)
    assert_equal((rows.dtype, rows.float().tolist()), (torch.float8_e4m3fn, want.tolist()))


@pytest.mark.parametrize("more", [0, 5])
def test_experts_of_rows(more: int) -> None:
    """Each row has its expert, or -1 if it is padding or one of ``more`` at the end."""
    x, chances = torch.ones(len(ROUTES), HIDDEN), torch.ones(ROUTES.shape)
    scale = torch.arange(len(ROUTES), dtype=torch.int32)[:, None]
    counts = [4, 0, 4, 4]  # with their padding
    rows, row_map, probabilities, scales, indices = paddle.moe_permute(
        *(x, scale, ROUTES, chances, EXPERTS, COUNTS, 4, True, True, True, sum(counts) + more)
    )
    want = [0, 0, 0, 0, 2, 2, 2, -1, 3, 3, -1, -1, *[-1] * more]
    assert_equal((indices.dtype, indices.tolist()), (torch.int32, want))
    filled = [[float(expert >= 0)] * HIDDEN for expert in want]
    assert_equal(rows.tolist(), filled)
    assert_equal(probabilities.tolist(), [row[0] for row in filled])
    assert scales is not None
    for row, expert in enumerate(want):
        if expert >= 0:
            assert_equal(int(row_map[int(scales[row]), expert]), row)
    assert_equal(row_map.tolist(), permuted(np.ones((*ROUTES.shape, 1)), 4)[1].tolist())


@pytest.mark.parametrize("mixed", [True, False])
def test_weighted_sum(mixed: bool) -> None:
    """The rows of a token are multiplied by their probabilities; both have gradients."""
    x = sample(0, (len(ROUTES), HIDDEN), torch.float32)
    chances = torch.tensor([0.25, 0.5]).expand(ROUTES.shape).clone()
    rows, row_map, probabilities, *_ = paddle.moe_permute(
        x, None, ROUTES, chances, EXPERTS, COUNTS, 4
    )
    rows, probabilities = rows.requires_grad_(), probabilities.requires_grad_()
    back, again = paddle.moe_unpermute(
        *(rows, row_map, ROUTES, probabilities[:, None], len(ROUTES), EXPERTS, mixed, True)
    )
    weights = chances * (ROUTES >= 0)
    np.testing.assert_allclose(wide(back), wide(x * weights.sum(1, keepdim=True)), rtol=1e-6)
    assert_equal(again.tolist(), weights.tolist())
    back.sum().backward()
    assert rows.grad is not None and probabilities.grad is not None
    assert_equal(rows.grad[:, 0].tolist(), probabilities.tolist())
    np.testing.assert_allclose(
        wide(probabilities.grad), wide(rows.detach().sum(1)), rtol=1e-6, atol=1e-6
    )


def test_permute_without_rows() -> None:
    x, chances = torch.ones(len(ROUTES), HIDDEN), torch.ones(ROUTES.shape)
    rows, row_map, probabilities, scales, _ = paddle.moe_permute(
        x, None, ROUTES, chances, EXPERTS, COUNTS, 4, do_gather=False
    )
    assert_equal((tuple(rows.shape), scales), ((0, HIDDEN), None))
    assert_equal(row_map.tolist(), permuted(np.ones((*ROUTES.shape, 1)), 4)[1].tolist())
    assert_equal(int(probabilities.sum()), sum(COUNTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_token_is_routed(dtype: torch.dtype) -> None:
    """Without rows, the tokens and their probabilities come back as zeros, with gradients."""
    x = torch.ones(3, HIDDEN, dtype=dtype, requires_grad=True)
    routes, chances = torch.full((3, 2), -1, dtype=torch.int32), torch.rand(3, 2)
    rows, row_map, probabilities, *_ = paddle.moe_permute(x, None, routes, chances, 2, [0, 0], 16)
    assert_equal(tuple(rows.shape), (0, HIDDEN))
    for mixed in (True, False):
        back, again = paddle.moe_unpermute(rows, row_map, routes, probabilities, 3, 2, mixed)
        assert_equal((back.dtype, back.tolist()), (dtype, [[0.0] * HIDDEN] * 3))
        assert_equal((again.dtype, again.tolist()), (torch.float32, [[0.0] * 2] * 3))
    back.sum().backward()
    assert x.grad is not None
    assert_equal(x.grad.tolist(), [[0.0] * HIDDEN] * 3)
    with pytest.raises(IndexError):  # a map of rows that are not there
        paddle.moe_unpermute(rows, row_map + 1, routes + 1, probabilities, 3, 2)


def test_precision_of_the_sum() -> None:
    """In bfloat16, 256 + 1 + 1 is 256 added one by one, and 258 if it is rounded once."""
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    rowmap, routes = torch.tensor([[0, 1, 2]]), torch.tensor([[2, 1, 0]])
    arguments = (rows, rowmap, routes, torch.ones(3), 1, 3)
    assert_equal(paddle.moe_unpermute(*arguments)[0].tolist(), [[258.0]])
    assert_equal(paddle.moe_unpermute(*arguments, use_mix_precision=False)[0].tolist(), [[256.0]])


def wrong_calls() -> list[tuple[Any, type[Exception], tuple[str, ...]]]:
    x, logits = gate()
    states, chances = torch.ones(len(ROUTES), HIDDEN), torch.ones(ROUTES.shape)
    permute: Any = lambda *a: paddle.moe_permute(states, None, ROUTES, *a)  # noqa: E731
    dispatch = paddle.moe_gate_dispatch
    return [
        (lambda: dispatch(x[1:], logits, None, 1, 1), ShapeError, ("(6, 3), (7, 4)",)),
        (lambda: dispatch(x, logits, x[0], 1, 1), ShapeError, ("corr_bias", "(3,)", "(4,)")),
        (lambda: dispatch(x, logits, None, 5, 1), ArgumentError, ("k=5", "1 to 4")),
        (lambda: dispatch(x, logits, None, 1, 0), ArgumentError, ("capacity=0",)),
        (lambda: paddle.moe_combine(x, logits, logits[:2].int()), ShapeError, ("(7, 4), (2, 4)",)),
        (lambda: permute(chances, 4, [4, 0, 3, 1], 1), ArgumentError, ("[4, 0, 3, 2]",)),
        (lambda: permute(chances, 4, COUNTS[:3], 1), ArgumentError, ("3 counts", "4 counts")),
        (lambda: permute(chances, 4, COUNTS, 0), ArgumentError, ("padding_alignment=0",)),
        (
            lambda: permute(chances, 4, COUNTS, 4, True, False, False, 11),
            ArgumentError,
            ("override_buffer_size=11", "expected 12 or more"),
        ),
        (
            lambda: paddle.moe_permute(states, states, ROUTES, chances, 4, COUNTS, 1, True, True),
            DtypeError,
            ("scale is torch.float32", "using_ue8m0_scale=True", "torch.int32"),
        ),
        (lambda: permute(chances[:2], 4, COUNTS, 1), ShapeError, ("expert_prob_topk", "(2, 2)")),
        (
            lambda: paddle.moe_permute(states[1:], None, ROUTES, chances, 4, COUNTS, 1),
            ShapeError,
            ("(5, 3), (6, 2)",),
        ),
        (
            lambda: paddle.moe_unpermute(states, ROUTES, ROUTES, chances, 6, 4),
            ShapeError,
            ("(6, 2)", "(6, 4)"),
        ),
    ]


@pytest.mark.parametrize("number", range(13))
def test_refusals(number: int) -> None:
    calls = wrong_calls()
    assert len(calls) == 13
    call, error, words = calls[number]
    with raises(error, *words):
        call()
