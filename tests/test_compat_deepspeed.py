"""commlib.compat.deepspeed: DeepSpeed's graph helpers without their defects."""

import gc
import weakref
from typing import Any

import pytest
import torch

from commlib.compat import deepspeed
from commlib.compat.deepspeed import graphs
from commlib.errors import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on


class Engine:
    """Low-precision gradients added to float32 ones, as in an optimizer."""

    def __init__(self, device: torch.device, value: float) -> None:
        self.low = [torch.full((3,), value, device=device) for _ in range(3)]
        self.high = [torch.zeros(3, device=device) for _ in self.low]

    def update_hp_grads(self) -> None:
        for high, low in zip(self.high, self.low, strict=True):
            high.add_(low)


@pytest.mark.parametrize("replay_first_step", [False, True])
@runs_on("unified_ranks")
def test_engines(comm: Any, replay_first_step: bool) -> None:
    """Two engines with one function of one name stay apart, and each call counts once."""
    both = Engine(comm.device, 1.0), Engine(comm.device, 10.0)
    for turn in range(1, 6):
        for engine in both:
            deepspeed.graph_process(replay_first_step, engine.update_hp_grads)
        assert_equal(
            [e.high[2].tolist() for e in both], [[turn * 1.0] * 3, [turn * 10.0] * 3], turn
        )
    gone = weakref.ref(both[0])
    before = len(graphs._captured)
    del both, engine
    gc.collect()
    assert_equal(gone(), None, "the engine is not kept")
    assert_equal(len(graphs._captured), before - 2, "nor are its graphs")


@runs_on("unified_ranks")
def test_norms(comm: Any) -> None:
    """Arguments count: other tensors, another norm, another length."""

    def norm_of(tensors: list[torch.Tensor], kind: float) -> Any:
        def norm_tensors(tensors: list[torch.Tensor], kind: float) -> torch.Tensor:
            return torch.stack([t.norm(kind) ** kind for t in tensors]).sum() ** (1 / kind)

        return deepspeed.graph_process(True, norm_tensors, tensors, kind)

    for kind in (2.0, 1.0):
        for length in (2, 4):
            for turn in range(3):
                tensors = [
                    torch.full((4,), turn + i + 1.0, device=comm.device) for i in range(length)
                ]
                assert_bits_equal(norm_of(tensors, kind), torch.cat(tensors).norm(kind), atol=1e-5)
    assert_equal(len(graphs._captured), 1, "functions")
    deepspeed.graph_clear()
    assert_equal(len(graphs._captured), 0, "after graph_clear")


@runs_on("unified_ranks")
def test_accelerator(comm: Any) -> None:
    """create_graph, capture_to_graph, replay_graph: nothing counts before a replay."""
    x, y = torch.ones(3, device=comm.device), torch.zeros(3, device=comm.device)
    graph = deepspeed.create_graph()
    with raises(GraphError, "empty"):
        deepspeed.replay_graph(graph)
    (x * 2).add_(1)  # warm
    with deepspeed.capture_to_graph(graph):
        y.add_(x * 2)
    assert_bits_equal(y, torch.zeros(3), "after the capture")
    for turn in range(1, 4):
        deepspeed.replay_graph(graph)
        assert_bits_equal(y, torch.full((3,), 2.0 * turn), f"replay {turn}")
    with raises(GraphError, "item"), deepspeed.capture_to_graph(graph):
        y.sum().item()
    with raises(GraphError, "empty"):
        deepspeed.replay_graph(graph)
