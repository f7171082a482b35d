"""The helpers of expert parallelism, against plain Python loops."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib import ops
from commlib.compat import paddle
from commlib.errors import ArgumentError, DtypeError, ShapeError
from tests._check import close
from tests._operator import compile_whole
from tests._ranks import Ranks

NAMES = (
    "assign_pos",
    "limit_by_capacity",
    "number_count",
    "prune_gate_by_capacity",
    "random_routing",
)


@pytest.mark.parametrize("name", NAMES)
def test_legacy_names_are_the_same_functions(name: str) -> None:
    assert getattr(paddle, name) is getattr(ops, name)


tokens = st.lists(st.integers(-2, 5), max_size=40)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(ids=tokens, experts=st.integers(1, 5), int32=st.booleans())
def test_counting_and_ordering(ids: list[int], experts: int, int32: bool) -> None:
    x = torch.tensor(ids, dtype=torch.int32 if int32 else torch.int64)
    counts = ops.number_count(x, experts)
    assert counts.dtype is torch.int64
    assert counts.tolist() == [ids.count(expert) for expert in range(experts)]
    order = ops.assign_pos(x, counts.cumsum(0))
    want = [at for expert in range(experts) for at, one in enumerate(ids) if one == expert]
    assert order.tolist() == want
    assert ops.assign_pos(x, counts.cumsum(0), total=len(want)).tolist() == want


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=6, max_size=6),
    room=st.lists(st.integers(0, 9), min_size=2, max_size=2),
)
def test_capacity(counts: list[int], room: list[int]) -> None:
    limited = ops.limit_by_capacity(torch.tensor(counts), torch.tensor(room), 3)
    left, want = list(room), []
    for at, asked in enumerate(counts):
        served = min(asked, left[at % 2])
        left[at % 2] -= served
        want.append(served)
    assert limited.tolist() == want


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(ids=tokens, counts=st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_pruning(ids: list[int], counts: list[int]) -> None:
    gate, left, want = torch.tensor(ids, dtype=torch.int64), list(counts), []
    for one in ids:
        if 0 <= one < 4:
            left[one] -= 1
            want.append(one if left[one] >= 0 else -1)
        else:
            want.append(one)
    assert ops.prune_gate_by_capacity(gate, torch.tensor(counts), 2, 2).tolist() == want


def test_random_routing() -> None:
    draw = np.random.default_rng(3)
    ids = torch.from_numpy(draw.integers(0, 9, (50, 2)))
    value, prob = torch.from_numpy(draw.random((50, 2))), torch.from_numpy(draw.random(50))
    want = ids.clone()
    for row in range(50):
        if 2 * value[row, 1] < prob[row]:
            want[row, 1] = -1
    assert torch.equal(ops.random_routing(ids, value, prob), want)
    assert (want == -1).any() and (want[:, 1] >= 0).any()


def gate(ids: torch.Tensor, value: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
    routed = ops.random_routing(ids, value, prob)[:, 1]
    capacity = torch.full((2,), 2, device=ids.device)
    counts = ops.limit_by_capacity(ops.number_count(routed, 4), capacity, 2)
    kept = ops.prune_gate_by_capacity(routed, counts, 2, 2)
    return ops.assign_pos(kept, ops.number_count(kept, 4).cumsum(0), total=3)


def gate_inputs(device: str, seed: int) -> tuple[torch.Tensor, ...]:
    draw = np.random.default_rng(seed)
    arrays = draw.integers(0, 4, (20, 2)), draw.random((20, 2)), draw.random(20)
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def compiled_and_captured(comm: Any) -> None:
    """One graph with the helpers gives eager's bits; none of them waits for the GPU."""
    device, whole = str(comm.device), gate
    inputs = gate_inputs(device, 1)
    close(compile_whole(whole)(*inputs), whole(*inputs), "compiled")
    if comm.device.type != "cuda":
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = whole(*inputs)
    for seed in range(3):
        for kept, new in zip(inputs, gate_inputs(device, seed), strict=True):
            kept.copy_(new)
        graph.replay()
        close(out, whole(*inputs), f"replay {seed}")


def test_compiled_and_captured(ranks: Ranks) -> None:
    ranks(compiled_and_captured)


def test_refusals() -> None:
    ids = torch.tensor([0, 1])
    with pytest.raises(DtypeError, match=r"numbers is torch.float32; type numbers.long\(\)"):
        ops.number_count(ids.float(), 2)
    with pytest.raises(ArgumentError, match="upper_range=0"):
        ops.number_count(ids, 0)
    with pytest.raises(ArgumentError, match="numbers is list"):
        ops.number_count([1], 2)
    with pytest.raises(ShapeError, match="cum_count has shape"):
        ops.assign_pos(ids, ids.view(1, 2))
    with pytest.raises(ArgumentError, match="total=-1"):
        ops.assign_pos(ids, ids, total=-1)
    with pytest.raises(ShapeError, match="2 entries; expected n_worker=3"):
        ops.limit_by_capacity(ids, ids, 3)
    with pytest.raises(ShapeError, match="n_expert \\* n_worker = 6"):
        ops.prune_gate_by_capacity(ids, ids, 2, 3)
    with pytest.raises(ArgumentError, match="n_worker=0"):
        ops.prune_gate_by_capacity(ids, ids, 2, 0)
    with pytest.raises(ShapeError, match=r"expected \[tokens, 2\]"):
        ops.random_routing(ids.view(1, 2), torch.zeros(2, 2), torch.zeros(1))
