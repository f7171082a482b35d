"""graph.backend.apply on graphs that have parameters and buffers, as traced modules do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from commlib import graph
from tests.support.checks import assert_bits_equal, assert_equal

ROWS, WIDTH = 4, 8


@torch.library.custom_op(
    "graph_state_tests::cut", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def cut(x: Tensor) -> Tensor:
    """Return a multiple; graphs are cut here."""
    return x * 3


cut.register_fake(torch.empty_like)


class Norm(nn.Module):
    """A module that counts its calls, and a buffer that each call changes."""

    def __init__(self, *, is_cut: bool) -> None:
        super().__init__()
        self.norm, self.is_cut = nn.BatchNorm1d(WIDTH), is_cut
        self.total = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, and scale by the buffer."""
        y: Tensor = self.norm(x)
        y = cut(y) if self.is_cut else y
        return y * self.total.mul_(2)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_apply_changes_no_state(is_cut: bool) -> None:
    module = Norm(is_cut=is_cut)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    graph.backend.apply(symbolic_trace(module), [torch.ones(ROWS, WIDTH)])
    for name, x in module.state_dict().items():
        assert_bits_equal(x, before[name], name)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
def test_state_counts_calls(is_cut: bool) -> None:
    expected, actual = (symbolic_trace(Norm(is_cut=is_cut)) for _ in range(2))
    replayed: Any = graph.backend.apply(actual, [torch.ones(ROWS, WIDTH)])
    for turn in range(5):
        x = torch.arange(32.0).view(ROWS, WIDTH) * (turn + 1)
        assert_bits_equal(replayed(x), expected(x), f"turn {turn}")
    state = expected.state_dict()
    for name, x in actual.state_dict().items():
        assert_bits_equal(x, state[name], name)
    rows = graph.report(replayed)
    assert_equal({row["replays"] for row in rows if row["eager"] is None}, {4}, "replays")
