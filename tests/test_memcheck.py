"""The expert calls of the memcheck program have the results that it expects, on any device."""

from typing import Any

import torch

from tests.programs import memcheck
from tests.support.checks import raises
from tests.support.runs_on import runs_on


@runs_on("unified_ranks")
def test_experts(comm: Any) -> None:
    memcheck.experts(comm)


@runs_on("unified_ranks")
def test_wrong_rows(comm: Any) -> None:
    """A row after the used ones that is not 0 ends the program."""
    rows, counts = torch.ones(1, 2, 4), torch.ones(1, dtype=torch.int32)
    with raises(AssertionError, "tensor"):
        memcheck.used_are(rows, counts, 1)
