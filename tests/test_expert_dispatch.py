"""ops.expert_dispatch and expert_combine: values against the definition, on any number of ranks."""

from typing import Any

import numpy as np
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

import commlib
from commlib import ops
from commlib.errors import CapacityError
from tests.support.checks import (
    Array,
    assert_bits_equal,
    assert_equal,
    raises,
    rounded,
    sample,
    wide,
)
from tests.support.examples import examples
from tests.support.experts import Routing, given, random_routing, tokens_of, with_weights
from tests.support.ranks import NewRanks, Ranks
from tests.support.runs_on import runs_on

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def results_for(routing: Routing, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return every rank's ``y``: other numbers than those that were sent, also in unused rows."""
    shape = (routing.local, routing.capacity, width)
    return [sample(20 + rank, shape, dtype) for rank in range(routing.size)]


def checked(
    comm: Any, routing: Routing, dtype: torch.dtype = torch.float32, width: int = 16, **how: Any
) -> None:
    """Compare a dispatch and a combine with the definition, bit for bit."""
    label = f"{dtype} {routing}"
    every = tokens_of(routing, width, dtype)
    sent = ops.expert_dispatch(every[comm.rank].to(comm.device), **given(routing, comm, **how))
    tables = routing.tables(comm.rank)
    rows = rounded(routing.dispatched([wide(x) for x in every], comm.rank), dtype)
    assert_bits_equal(sent.rows, rows, f"rows {label}")
    assert_equal(sent.scales, None, "scales")
    handle = sent.handle
    for name in ("positions", "sources", "demand"):
        assert_bits_equal(getattr(handle, name), tables[name], f"{name} {label}")
    assert_bits_equal(sent.counts, tables["counts"], f"counts {label}")
    assert_bits_equal(handle.row_weights, routing.row_weights(comm.rank), f"weights {label}")
    ys = results_for(routing, width + 3, dtype)
    options = {name: how[name] for name in how if name == "use_calc_stream"}
    for weighted in (True, False):
        out = ops.expert_combine(
            ys[comm.rank].to(comm.device), handle, weighted=weighted, **options
        )
        expected = routing.combined([wide(y) for y in ys], comm.rank, weighted=weighted)
        assert_bits_equal(out, rounded(expected, dtype), f"combined {weighted} {label}")
        exact = routing.combined([wide(y).astype("f8") for y in ys], comm.rank, weighted=weighted)
        apart = float(np.abs(wide(out) - exact).max(initial=0))
        assert_equal(apart < 40 * torch.finfo(dtype).eps, True, f"{apart} from float64 {label}")


def values(comm: Any, seeds: range) -> None:
    for seed in seeds:
        routing = random_routing(comm.size, seed)
        checked(comm, routing, DTYPES[seed % 4], ids=(torch.int32, torch.int64)[seed // 4 % 2])
    checked(comm, random_routing(comm.size, 99), use_calc_stream=False)


def test_values(ranks: Ranks) -> None:
    ranks(values, range(8))


def test_values_of_many_ranks(many_ranks: Ranks) -> None:
    many_ranks(values, range(8, 16))


def test_values_of_four(new_ranks: NewRanks) -> None:
    with new_ranks(4) as ranks:
        ranks(values, range(16, 22))


def gradients_of_one(ring: Any, routing: Routing, dtype: torch.dtype) -> None:
    """Compare all gradients of a layer on a ring of one rank with the definition."""
    [x], [grad] = (tokens_of(routing, 16, dtype, seed) for seed in (0, 9))
    arguments = given(routing, ring, ring_id=ring.ring_id)
    x, weights = x.to(ring.device).requires_grad_(), arguments["weights"].requires_grad_()
    sent = ops.expert_dispatch(x, **arguments)
    ops.expert_combine(sent.rows, sent.handle).backward(grad.to(ring.device))
    grads, label = [wide(grad)], f"{dtype} {routing}"
    of_rows = rounded(routing.gradient_of_y(grads, 0), dtype)
    expected = routing.combined([wide(of_rows)], 0, weighted=False)
    assert_bits_equal(x.grad, rounded(expected, dtype), f"gradient of x {label}")
    expected = routing.gradient_of_weights(grads, [wide(sent.rows)], 0).astype("f4")
    assert_bits_equal(weights.grad, expected, f"gradient of weights {label}", atol=2e-5)


@runs_on("ranks")
def test_a_ring_of_one(comm: Any) -> None:
    ring = commlib.new_ring(80 + comm.rank, [comm.rank])
    assert ring is not None
    for seed in range(8):
        routing, dtype = random_routing(1, seed), DTYPES[seed % 4]
        checked(ring, routing, dtype, ring_id=ring.ring_id)
        gradients_of_one(ring, random_routing(1, seed, tokens=[seed + 1]), dtype)
    commlib.close_ring(ring.ring_id)


NUMBERS = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 3))
EDGES: dict[str, Routing] = {
    "all tokens for one expert": Routing(3, 3, [[[2, 2]] * 4, [[2, 1]] * 3], 2),
    "no token for any expert": Routing(4, 2, [[[-1], [4]], [[9]]], 1),
    "no tokens on a rank": Routing(5, 3, [[], [[0, 4], [1, 1]]], 2),
    "no tokens at all": Routing(2, 1, [[], []], 3),
    "more ranks than experts": Routing(1, 4, [[[0]], [[0], [0]]], 1),
    "one row per expert": Routing(2, 1, [[[1, 0]], [[0, 1]]], 2),
}


@runs_on("ranks")
def test_edges(comm: Any) -> None:
    for routing in EDGES.values():
        checked(comm, with_weights(routing))


@runs_on("ranks")
def test_rows_without_elements(comm: Any) -> None:
    routing = random_routing(comm.size, 4, tokens=[3, 2])
    x = tokens_of(routing, 0, torch.float32)[comm.rank].to(comm.device)
    sent = ops.expert_dispatch(x, **given(routing, comm))
    assert_bits_equal(sent.counts, routing.tables(comm.rank)["counts"], "counts")
    assert_equal(ops.expert_combine(sent.rows, sent.handle).shape, x.shape, "shape")


@examples(25)
@drawn(numbers=NUMBERS, data=st.data())
def test_any_choices(unified_ranks: Ranks, numbers: tuple[int, int, int], data: Any) -> None:
    num_experts, capacity, top_k = numbers
    token = st.lists(st.integers(-1, num_experts), min_size=top_k, max_size=top_k)
    ids = data.draw(st.tuples(*[st.lists(token, max_size=5)] * 2))
    unified_ranks(checked, with_weights(Routing(num_experts, capacity, list(ids), top_k)))


@runs_on("ranks")
def test_one_choice_without_weights(comm: Any) -> None:
    """A 1-D tensor of ids is one choice a token; without weights rows count once."""
    routing = random_routing(comm.size, 5, top_k=1, capacity=9, tokens=[4] * comm.size)
    x = tokens_of(routing, 4, torch.float32)[comm.rank].to(comm.device)
    ids = given(routing, comm)["expert_ids"][:, 0]
    sent = ops.expert_dispatch(x, ids, routing.num_experts, 9)
    assert_equal(sent.handle.weights, None, "weights")
    expected = torch.where(sent.handle.positions >= 0, x, 0.0)
    assert_bits_equal(ops.expert_combine(sent.rows, sent.handle), expected, "sent and returned")
    used = (sent.handle.sources[:, 0] >= 0).float()
    assert_bits_equal(sent.handle.row_weights, used, "weights of rows")


@runs_on("ranks")
def test_weights_on_some_ranks(comm: Any) -> None:
    """A rank without weights applies those of the others to their rows, also in gradients."""
    routing = random_routing(comm.size, 5, tokens=[4, 3])
    routing.weights[1][:] = 1
    every, arguments = tokens_of(routing, 8, torch.float32), given(routing, comm)
    if comm.rank == 1:
        arguments["weights"] = None
    sent = ops.expert_dispatch(every[comm.rank].to(comm.device), **arguments)
    ys = results_for(routing, 8, torch.float32)
    y = ys[comm.rank].to(comm.device).requires_grad_()
    expected = routing.combined([wide(one) for one in ys], comm.rank)
    assert_bits_equal(ops.expert_combine(y.detach(), sent.handle), expected, "eager")
    out = ops.expert_combine(y, sent.handle)
    assert_bits_equal(out.detach(), expected, "with a gradient")
    (grad,) = torch.autograd.grad(out, y, every[comm.rank].to(comm.device))
    expected = routing.gradient_of_y([wide(x) for x in every], comm.rank)
    assert_bits_equal(grad, expected, "gradient")


def quantized_rows(x: Array) -> tuple[torch.Tensor, Array]:
    """Return the float8 rows and the scales of their groups of 128."""
    parts = x.astype("f4").reshape(len(x), -1, 128)
    scales = np.abs(parts).max(2) / np.float32(448)
    scales = np.where(scales == 0, np.float32(1), scales)
    elements = np.clip(parts / scales[..., None], -448, 448)
    return torch.from_numpy(elements).to(torch.float8_e4m3fn), scales


@runs_on("ranks")
def test_float8(comm: Any) -> None:
    routing = random_routing(comm.size, 7, tokens=[5] * comm.size)
    for dtype in (torch.float32, torch.bfloat16):
        every = tokens_of(routing, 256, dtype)
        for x in every:
            x[0, :128] = 0
            x[1, :128] = 0
            x[1, 3] = -627 * 2.0**-149  # its scale is rounded to 2**-149
        sent = ops.expert_dispatch(
            every[comm.rank].to(comm.device), **given(routing, comm, quantize="fp8")
        )
        parts = [quantized_rows(wide(x)) for x in every]
        rows = routing.dispatched([wide(v.float()).reshape(-1, 256) for v, _ in parts], comm.rank)
        assert_bits_equal(sent.rows, torch.from_numpy(rows).to(torch.float8_e4m3fn), f"{dtype}")
        scales = routing.dispatched([scales for _, scales in parts], comm.rank)
        assert sent.scales is not None
        assert_bits_equal(sent.scales, scales, f"scales of {dtype}")


@runs_on("cpu_ranks")
def test_overflow_on_a_cpu(comm: Any) -> None:
    """Every rank gets the same error from the call itself, and the ring stays usable."""
    routing = with_weights(Routing(3, 2, [[[2, 2]], [[2, 1], [1, 0]]], 2))
    x = tokens_of(routing, 4, torch.float32)[comm.rank]
    arguments = {**given(routing, comm), "on_overflow": "error"}
    words = "expert 2 of rank 1 got 3 rows (2 from rank 0, 1 from rank 1)", "capacity=2"
    with raises(CapacityError, *words, "on_overflow='drop'"):
        ops.expert_dispatch(x, **arguments)
    comm.check()
    sent = ops.expert_dispatch(x, **{**arguments, "capacity": 3})
    assert_equal(sent.counts.tolist(), [[1, 2], [3, 0]][comm.rank], "counts afterwards")
    dropped = ops.expert_dispatch(x, **given(routing, comm))
    beyond = (dropped.handle.demand - 2).clamp(min=0)
    assert_equal(beyond.tolist(), [0, 0, 1], "dropped rows, exactly")


@runs_on("all_gpu_ranks")
def test_overflow_on_a_gpu(comm: Any) -> None:
    """The ring's next check raises it, once, on every rank; also of the plain form (float64)."""
    routing = with_weights(Routing(3, 2, [[[2, 2]], [[2, 1], [1, 0]]], 2))
    arguments = {**given(routing, comm), "on_overflow": "error"}
    words = "expert 2 of rank 1 got 3 rows (2 from rank 0, 1 from rank 1)", "capacity=2"
    for dtype in (torch.bfloat16, torch.float64):
        x = tokens_of(routing, 8, dtype)[comm.rank].to(comm.device)
        ops.expert_dispatch(x, **arguments)
        torch.cuda.synchronize()
        with raises(CapacityError, *words):
            comm.check()
        comm.check()
        ops.expert_dispatch(x, **{**arguments, "capacity": 3})
        torch.cuda.synchronize()
        comm.check()


@runs_on("cpu_ranks")
def test_ranks_with_other_options(comm: Any) -> None:
    """Ranks may overflow differently."""
    x, ids = torch.ones(3, 4), torch.zeros((3, 2), dtype=torch.int64)
    if comm.rank == 0:
        with raises(CapacityError, "expert 0 of rank 0 got 12 rows"):
            ops.expert_dispatch(x, ids, 2, 2)
    else:
        sent = ops.expert_dispatch(x, ids, 2, 2, on_overflow="drop")
        assert_equal(sent.handle.demand.tolist(), [12, 0], "demand")
    comm.barrier()


def masked(comm: Any, active: list[bool]) -> None:
    routing = random_routing(comm.size, 11, tokens=[5] * comm.size, capacity=9, active=active)
    checked(comm, routing)


@runs_on("many_ranks")
def test_ranks_that_are_left_out(comm: Any) -> None:
    for number in range(1, 2**3):
        active = [bool(number >> rank & 1) for rank in range(3)] + [True] * (comm.size - 3)
        masked(comm, active)


@runs_on("three_ranks")
def test_a_rank_that_is_left_out_makes_no_call(comm: Any) -> None:
    if comm.rank != 1:
        masked(comm, [True, False, True])
