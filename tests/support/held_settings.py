"""A module that reads a setting of what it holds, and the check that each value of it counts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from commlib import graph
from tests.support.checks import assert_bits_equal, assert_equal

VALUES = (1.0, 1.0, 1.0, 3.0, 3.0, 1.0)


class Held(nn.Module):
    """A module that reads what it holds."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self._held, self.read = held, read

    def forward(self, x: torch.Tensor) -> Any:
        """Return a multiple."""
        return x * self.read(self._held)


def each_value_counts(fn: Any, change: Callable[[float], object]) -> None:
    """Compare calls with the values of a setting; each value has its graph."""
    g = graph.capture(fn, outputs="copy", verify=False)
    for turn, value in enumerate(VALUES):
        change(value)
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), value), f"turn {turn}")
    assert_equal((len(g.entries), g.entries.replays >= 3), (2, True), f"graphs: {g}")
