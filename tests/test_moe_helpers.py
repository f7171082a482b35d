"""The helpers of expert parallelism, against plain Python loops."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib import graph, ops
from commlib.compat import paddle
from commlib.errors import ArgumentError, DeviceError, DtypeError, LayoutError, ShapeError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.examples import examples
from tests.support.operator import compile_whole
from tests.support.runs_on import runs_on


@pytest.mark.parametrize("name", ["limit_by_capacity", "prune_gate_by_capacity"])
def test_legacy_names_are_the_same_functions(name: str) -> None:
    assert getattr(paddle, name) is getattr(ops, name)


def test_other_legacy_names() -> None:
    """Counts come in the dtype of the ids; an argument knows one value."""
    ids, value, prob = gate_inputs("cpu", 4)
    for dtype in (torch.int32, torch.int64):
        counts = paddle.number_count(ids.to(dtype), 3)
        assert counts.dtype is dtype
        assert torch.equal(counts.long(), ops.number_count(ids, 3))
    routed = ops.random_routing(ids, value, prob)
    assert torch.equal(paddle.random_routing(ids, value, prob, 2), routed)
    with pytest.raises(ArgumentError, match="topk=3"):
        paddle.random_routing(ids, value, prob, topk=3)


def test_the_documented_vector() -> None:
    """Upstream's own example; ids come as [tokens, choices]."""
    ids = torch.tensor([[0, 2], [0, 2]])
    counts = ops.number_count(ids, 6)
    assert counts.tolist() == [2, 0, 2, 0, 0, 0]
    assert ops.assign_pos(ids, counts.cumsum(0)).tolist() == [2, 0, 3, 1]
    one_each = torch.tensor([1, 0, 1, 0, 0, 0])
    assert ops.prune_gate_by_capacity(ids, one_each, 6, 1).tolist() == [[0, 2], [-1, -1]]


def test_large_numbers() -> None:
    """A capacity of 64 bits leaves counts of 32 bits alone."""
    counts = torch.tensor([5, 5], dtype=torch.int32)
    limited = ops.limit_by_capacity(counts, torch.tensor([2**33, 3]), 1)
    assert (limited.tolist(), limited.dtype) == ([5, 3], torch.int32)


tokens = st.lists(st.integers(-2, 5), max_size=40)


@examples(60)
@given(ids=tokens, experts=st.integers(1, 5), int32=st.booleans())
def test_counting_and_ordering(ids: list[int], experts: int, int32: bool) -> None:
    x = torch.tensor(ids, dtype=torch.int32 if int32 else torch.int64)
    counts = ops.number_count(x, experts)
    assert counts.dtype is torch.int64
    assert counts.tolist() == [ids.count(expert) for expert in range(experts)]
    order = ops.assign_pos(x, counts.cumsum(0))
    places = list(enumerate(ids))[::-1]
    want = [at for expert in range(experts) for at, one in places if one == expert]
    assert order.tolist() == want
    assert ops.assign_pos(x, counts.cumsum(0), total=len(want)).tolist() == want


@examples(60)
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


@examples(60)
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
    pruned = ops.prune_gate_by_capacity(routed, counts, 2, 2)
    return ops.assign_pos(pruned, ops.number_count(pruned, 4).cumsum(0), total=3)


def gate_inputs(device: str, seed: int) -> tuple[torch.Tensor, ...]:
    draw = np.random.default_rng(seed)
    arrays = draw.integers(0, 4, (20, 2)), draw.random((20, 2)), draw.random(20)
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


@runs_on("ranks")
def test_compiled(comm: Any) -> None:
    """One compiled function with the helpers gives eager's bits."""
    inputs = gate_inputs(str(comm.device), 1)
    assert_bits_equal(compile_whole(gate)(*inputs), gate(*inputs), "compiled")


@runs_on("all_gpu_ranks")
def test_captured(comm: Any) -> None:
    """One graph with the helpers gives eager's bits; none of them waits for the GPU."""
    device = str(comm.device)
    inputs = gate_inputs(device, 1)
    gate(*inputs)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = gate(*inputs)
    for seed in range(3):
        for static, new in zip(inputs, gate_inputs(device, seed), strict=True):
            static.copy_(new)
        graph.replay()
        assert_bits_equal(out, gate(*inputs), f"replay {seed}")


@runs_on("ranks")
def test_unknown_total(comm: Any) -> None:
    """The number of positions is known at run time alone: one graph for any; counts anywhere."""
    graph = compile_whole(lambda ids, counts: ops.assign_pos(ids, counts) * 2)
    for seed in range(3):
        ids = gate_inputs(str(comm.device), seed)[0]
        ids[: 4 * seed] = -1
        cum_count = ops.number_count(ids, 4).cumsum(0)
        want = ops.assign_pos(ids, cum_count, total=2 * len(ids) - 8 * seed)
        assert_bits_equal(ops.assign_pos(ids, cum_count), want, "counts on the device")
        assert_bits_equal(ops.assign_pos(ids, cum_count.cpu()), want, "counts on the CPU")
        assert_bits_equal(graph(ids, cum_count), want * 2, "compiled")
    torch.library.opcheck(torch.ops.commlib.assign_pos.default, (ids, cum_count))


@runs_on("all_gpu_ranks")
def test_captured_total(comm: Any) -> None:
    """A capture reads counts on the CPU; on the GPU it can't, and says what to type."""
    ids = gate_inputs(str(comm.device), 1)[0]
    cum_count = ops.number_count(ids, 4).cumsum(0)
    on_cpu, want = cum_count.cpu(), ops.assign_pos(ids, cum_count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = ops.assign_pos(ids, on_cpu)
        with raises(ArgumentError, "a capture", "total="):
            ops.assign_pos(ids, cum_count)
    graph.replay()
    assert_bits_equal(out, want, "captured")


@runs_on("cpu_ranks")
def test_captured_on_a_cpu(comm: Any) -> None:
    """A captured function needs ``total``; it raises instead of keeping the first one."""
    captured = graph.capture(ops.assign_pos, outputs="copy")
    for seed in range(5):
        ids = gate_inputs("cpu", seed)[0]
        cum_count = ops.number_count(ids, 4).cumsum(0)
        want = ops.assign_pos(ids, cum_count)
        assert_bits_equal(captured(ids, cum_count, total=ids.numel()), want, f"replay {seed}")
        with raises(ArgumentError, "a capture can't read cum_count[-1]", "total="):
            captured(ids, cum_count)
    assert_equal([row["eager"] for row in graph.report(captured)], [None], "captured, not eager")


@runs_on("ranks")
def test_tensors_without_readable_memory(comm: Any) -> None:
    """Sparse and freed tensors are refused with what to pass, as other operators do."""
    ids = torch.tensor([1, 2], device=comm.device)
    freed = ids.clone()
    freed.untyped_storage().resize_(0)
    kinds = [(ids.to_sparse(), LayoutError, "to_dense()"), (freed, DeviceError, "again")]
    for bad, error, remedy in kinds:
        calls: dict[str, Callable[[], Any]] = {
            "assign_pos: x": lambda x=bad: ops.assign_pos(x, ids),
            "assign_pos: cum_count": lambda x=bad: ops.assign_pos(ids, x),
            "number_count: numbers": lambda x=bad: ops.number_count(x, 3),
            "limit_by_capacity: expert_count": lambda x=bad: ops.limit_by_capacity(x, ids, 1),
            "prune_gate_by_capacity: gate_idx": lambda x=bad: ops.prune_gate_by_capacity(
                x, ids, 2, 1
            ),
            "random_routing: prob": lambda x=bad: ops.random_routing(ids[None], ids[None], x),
        }
        for role, call in calls.items():
            with raises(error, role, "torch.strided memory", remedy):
                call()


@runs_on("ranks")
def test_forward_mode(comm: Any) -> None:
    """Inside forward-mode autograd the positions come from the registered op."""
    ids = gate_inputs(str(comm.device), 2)[0]
    cum_count = ops.number_count(ids, 4).cumsum(0)
    want = ops.assign_pos(ids, cum_count)
    with torch.autograd.forward_ad.dual_level():
        assert_bits_equal(ops.assign_pos(ids, cum_count), want)


def test_refusals() -> None:
    ids = torch.tensor([0, 1])
    with pytest.raises(DtypeError, match=r"numbers is torch.float32; pass numbers.long\(\)"):
        ops.number_count(ids.float(), 2)
    with pytest.raises(ArgumentError, match="upper_range=0"):
        ops.number_count(ids, 0)
    with pytest.raises(ArgumentError, match="numbers is list"):
        ops.number_count([1], 2)
    with pytest.raises(ShapeError, match="cum_count has shape"):
        ops.assign_pos(ids, ids.view(1, 2))
    with pytest.raises(ArgumentError, match=r"cum_count\[1\] is 3; 2 ids of x are 0 to 1"):
        ops.assign_pos(ids, torch.tensor([1, 3]))
    values, draws = torch.zeros(1, 2), torch.zeros(1)
    for value, prob in (([1.0], draws), (values, [1.0])):
        with pytest.raises(ArgumentError, match=r"list; expected a torch\.Tensor"):
            ops.random_routing(ids.view(1, 2), value, prob)
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
