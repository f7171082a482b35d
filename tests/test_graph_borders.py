"""graph.capture: arguments that share memory, masks of bytes, and ranks that differ."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import commlib
from commlib import graph
from commlib.graph import GraphError
from commlib.graph.backends.base import CpuBackend
from commlib.graph.recording.rank_agreement import check_ranks_agree, same_key
from commlib.graph.watching.recorded_collective import Collective
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on

TURNS = 4  # the call itself, the capture's first replay, and verified and plain ones after that


@pytest.mark.parametrize("twice_first", [False, True])
def test_one_tensor_in_two_places(twice_first: bool) -> None:
    """The graph has one tensor or two; a write to one of two must not be seen in the other."""

    @graph.capture(outputs="copy")
    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a + 10 * b

    for one in (twice_first, not twice_first):
        for _ in range(TURNS):
            x, y = torch.zeros(2), torch.zeros(2)
            result = call(x, x if one else y)
            assert result.tolist() == ([11.0, 11.0] if one else [1.0, 1.0])
            assert x.tolist() == [1.0, 1.0]


def test_a_capture_leaves_no_cast_of_a_weight_to_the_caller() -> None:
    """An eager call of the same autocast block would save memory that the next replay writes."""
    weight = torch.ones(8, 8, requires_grad=True)
    x = torch.ones(4, 8, requires_grad=True)
    call = graph.capture(lambda x: x @ weight, outputs="copy")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            call(x.detach())
        y = x @ weight
        with torch.no_grad():
            weight.mul_(2)
            torch.clear_autocast_cache()
            call(x.detach())
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[8.0] * 8] * 4


def test_an_input_that_a_backward_needs_is_written_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the graph reads the caller's tensor in place, as on a GPU."""
    monkeypatch.setattr(CpuBackend, "copies_arguments", False)
    call, x = graph.capture(lambda x: x * x), torch.ones(2, requires_grad=True)
    for turn in range(1, TURNS):
        call(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0 * turn] * 2
    y = call(x)
    with torch.no_grad():
        x.add_(1)

    with pytest.raises(GraphError, match="modified in place since its forward"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_an_index_by_a_mask(dtype: torch.dtype) -> None:
    mask = torch.tensor([1, 0, 1]).to(dtype)
    with pytest.raises(GraphError, match="the shape of an index by a mask depends on its values"):
        graph.capture(lambda x: x[mask])(torch.arange(3.0))


@pytest.fixture
def ring() -> Iterator[commlib.CommContext]:
    yield commlib.CommContextManager.instance().create(6, [0], device="cpu")
    commlib.shutdown()


def test_a_collective_that_writes_memory_of_an_argument(ring: commlib.CommContext) -> None:
    """The graph has its own copy of the argument, which the collective does not write."""
    table = torch.zeros(6)
    state = table[:4]

    def step(x: torch.Tensor) -> torch.Tensor:
        ring.all_reduce(state, torch.ones(4))
        return x * 2

    with pytest.raises(GraphError, match="shares memory with a tensor that the function uses"):
        graph.capture(step)(table[2:])


@runs_on("cpu_ranks")
def test_other_collectives_on_another_rank(comm: Any) -> None:
    """As many collectives on both ranks, of the same sizes, but not the same ones."""
    ops = [("sum", "max"), ("sum", "sum")]
    seen = [
        Collective(comm, "all_reduce", "float32", 3, f", op {both[comm.rank]}", f"line {i}")
        for i, both in enumerate(reversed(ops))
    ]
    check_ranks_agree([comm], seen[:1], None, counted=False)
    with raises(GraphError, "number 1 is rank 0", "op sum", "rank 1", "op max", "line 1"):
        check_ranks_agree([comm], seen, None, counted=False)


class Option:
    """A plain argument whose text has an address."""


@runs_on("cpu_ranks")
def test_keys_of_ranks(comm: Any) -> None:
    """The number of a device and an address differ between ranks that make the same call."""
    held = [Option() for _ in range(1 + comm.rank)]
    key = torch.device("cuda", comm.rank), held[-1], frozenset({"a", "b"})
    assert_equal(same_key(comm, key, True), True, "equal keys")
    with raises(GraphError, "call with different keys", "rank 1"):
        same_key(comm, (*key, comm.rank), True)
