"""graph.capture: calls that a key must tell apart, and functions that no replay could follow."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import commlib
from commlib import graph
from commlib.graph import GraphError
from commlib.graph.rank_agreement import check_ranks_agree, same_key
from commlib.graph.recorder import Collective
from tests.support.checks import refused, same
from tests.support.ranks import Ranks

TURNS = 4  # the call itself, the capture's first replay, and verified and plain ones after that


# -- one key per kind of call ----------------------------------------------------------------------


def test_a_weight_that_wants_a_gradient_from_now_on() -> None:
    layer = torch.nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    call, x = graph.capture(layer), torch.ones(4, 3)
    for _ in range(TURNS):
        call(x).sum().backward()
    layer.weight.requires_grad_(True)

    call(x).sum().backward()

    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[4.0] * 3] * 2


def test_the_default_dtype() -> None:
    call = graph.capture(lambda x: torch.zeros(2) + x)
    x = torch.ones(1, dtype=torch.float16)
    for _ in range(TURNS):
        assert call(x).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert call(x).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


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
            found = call(x, x if one else y)
            assert found.tolist() == [11.0, 11.0] if one else [1.0, 1.0]
            assert x.tolist() == [1.0, 1.0]


def test_a_cast_that_the_caller_has_cached() -> None:
    """A graph that reads the caller's cast of a weight would go on with an old one."""
    layer, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    call = graph.capture(layer, first="warmup", warmup=1, outputs="copy")
    for turn in range(TURNS):
        with torch.no_grad():
            layer.weight.fill_(float(turn))
        with torch.autocast("cpu", torch.bfloat16):
            want = layer(x)
            with torch.no_grad():
                assert torch.equal(call(x), want), turn


def test_a_backward_inside_autocast() -> None:
    """It runs in the types of the caller's autocast, as an eager one does."""
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    call, x = graph.capture(lambda x: x @ weight), torch.randn(4, 8, requires_grad=True)

    def grads(fn: Callable[..., Any], *, inside: bool) -> torch.Tensor:
        y = fn(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            (grad,) = torch.autograd.grad(y.sum(), x)
        return grad

    want = {inside: grads(lambda x: x @ weight, inside=inside) for inside in (False, True)}
    assert not torch.equal(want[False], want[True])
    for inside in (False, False, True, False, True):
        assert torch.equal(grads(call, inside=inside), want[inside])


# -- functions that no replay could follow ---------------------------------------------------------


def test_the_gradient_of_an_argument() -> None:
    x = torch.ones(2, requires_grad=True)
    x.grad = torch.ones(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        assert x.grad is not None
        return x.grad * 2

    with pytest.raises(GraphError, match=r"reads \.grad of argument tensor 0"):
        graph.capture(step)(x)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_an_index_by_a_mask(dtype: torch.dtype) -> None:
    mask = torch.tensor([1, 0, 1]).to(dtype)
    with pytest.raises(GraphError, match="the shape of an index by a mask depends on its values"):
        graph.capture(lambda x: x[mask])(torch.arange(3.0))


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x),
    "dlpack": lambda x: np.from_dlpack(x),
}


@pytest.mark.parametrize("name", READS)
def test_values_that_the_host_reads(name: str) -> None:
    with pytest.raises(GraphError, match=f"{name}.* can't stand in a graph"):
        graph.capture(lambda x: READS[name](x + 1))(torch.ones(2))


@pytest.mark.parametrize("later", [1, 2])
def test_an_eager_part_that_returns_another_shape(later: int) -> None:
    """A single element would be broadcast over the old shape."""
    length = 3
    part: Any = graph.eager(lambda x: x.new_ones(length))
    call = graph.capture(lambda x: part(x) + x.sum(), outputs="copy")
    for _ in range(TURNS):
        call(torch.zeros(3))
    length = later

    with pytest.raises(GraphError, match="returns something else than at the capture"):
        call(torch.zeros(3))


def test_state_that_gets_a_history() -> None:
    """The refused call is undone: neither values nor a history stay."""
    state, weight = torch.zeros(2), torch.ones(2, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        state.copy_(weight * x)
        return x * 2

    with pytest.raises(GraphError, match=r"write x\.detach\(\) into it"):
        graph.capture(step)(torch.ones(2))

    assert state.tolist() == [0.0, 0.0]
    assert state.grad_fn is None
    assert not state.requires_grad


def test_a_tensor_that_a_backward_needs_is_written_before_it() -> None:
    scale, x = torch.full((2,), 3.0), torch.ones(2, requires_grad=True)
    call = graph.capture(lambda x: x * scale)
    for _ in range(TURNS):
        call(x).sum().backward()
    y = call(x)
    scale.add_(1)

    with pytest.raises(GraphError, match="modified in place since its forward"):
        y.sum().backward()


@pytest.fixture
def ring() -> Iterator[commlib.CommContext]:
    yield commlib.CommContextManager.instance().create(6, [0], device="cpu")
    commlib.shutdown()


def test_a_collective_that_writes_memory_of_an_argument(ring: commlib.CommContext) -> None:
    """The argument gets a copy of its own in the graph, which the collective does not write."""
    table = torch.zeros(6)
    state = table[:4]

    def step(x: torch.Tensor) -> torch.Tensor:
        ring.all_reduce(state, torch.ones(4))
        return x * 2

    with pytest.raises(GraphError, match="shares memory with a tensor that the function uses"):
        graph.capture(step)(table[2:])


# -- agreement of ranks ----------------------------------------------------------------------------


def other_reduction(comm: Any) -> None:
    """As many collectives on both ranks, of the same sizes, but not the same ones."""
    ops = [("sum", "max"), ("sum", "sum")]
    seen = [
        Collective(comm, "all_reduce", "float32", 3, f", op {both[comm.rank]}", f"line {i}")
        for i, both in enumerate(reversed(ops))
    ]
    check_ranks_agree([comm], seen[:1], None, counted=False)
    with refused(GraphError, "number 1 is rank 0", "op sum", "rank 1", "op max", "line 1"):
        check_ranks_agree([comm], seen, None, counted=False)


def test_other_collectives_on_another_rank(cpu_ranks: Ranks) -> None:
    cpu_ranks(other_reduction)


class Option:
    """A plain argument whose text has an address."""


def keys_of_ranks(comm: Any) -> None:
    """The number of a device and an address differ between ranks that make the same call."""
    held = [Option() for _ in range(1 + comm.rank)]
    key = torch.device("cuda", comm.rank), held[-1], frozenset({"a", "b"})
    same(same_key(comm, key, True), True, "equal keys")
    with refused(GraphError, "call with different keys", "rank 1"):
        same_key(comm, (*key, comm.rank), True)


def test_keys_of_ranks(cpu_ranks: Ranks) -> None:
    cpu_ranks(keys_of_ranks)
