"""Random programs that change what a captured step uses, between its calls, against eager code."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib import graph
from tests.support.changing import CHANGES, OPTIMIZERS, PARTS, Program, Seen, steps
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.examples import examples
from tests.support.runs_on import runs_on

_STEPS = 10


def programs(changes: st.SearchStrategy[tuple[tuple[str, ...], ...]]) -> st.SearchStrategy[Program]:
    return st.builds(
        Program,
        part=st.sampled_from(sorted(PARTS)),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        changes=changes,
        verify=st.sampled_from(["auto", False]),
    )


def several() -> st.SearchStrategy[tuple[tuple[str, ...], ...]]:
    """Before each step up to two changes."""
    names = st.lists(st.sampled_from(sorted(CHANGES)), max_size=2, unique=True).map(tuple)
    return st.tuples(*[names] * _STEPS)


def compare(ring: Any, program: Program) -> bool:
    """Compare every step; returns False for a program whose eager run fails."""
    expected: list[Seen] = []
    try:
        expected += steps(program, ring, lambda fn: fn)
    except RuntimeError:  # a loss without a leaf that is trained, a hook of a frozen parameter
        return False
    results = steps(program, ring, graph.capture(verify=program.verify))
    for turn, (actual, exact) in enumerate(zip(results, expected, strict=True)):
        label = f"step {turn} of {program}"
        assert_equal(actual.keys(), exact.keys(), f"values in {label}")
        for name, value in exact.items():
            assert_equal(type(actual[name]), type(value), f"{name} in {label}")
            if isinstance(value, torch.Tensor):
                assert_bits_equal(actual[name], value, f"{name} in {label}")
            else:
                assert_equal(actual[name], value, f"{name} in {label}")
    return True


@examples(3)
@given(drawn=st.lists(programs(several()), min_size=8, max_size=8))
@runs_on("unified_ranks", deadline=120)
def test_programs_with_changes(comm: Any, drawn: list[Program]) -> None:
    """Parameters, layers, moments, averages, hooks, settings: whatever changes, eager's bits."""
    compared = [compare(comm, program) for program in drawn]
    assert sum(compared) > len(compared) // 2, "most eager runs fail: nothing is compared"


@pytest.mark.parametrize("change", CHANGES)
@runs_on("unified_ranks")
def test_each_change(comm: Any, change: str) -> None:
    """One change in the middle, in calls that are not verified: nothing else may find it."""
    first = () if not change.startswith("one hook") else ("a hook",)
    changes = (first, *[()] * 4, (change,), *[()] * 3)
    assert compare(comm, Program("step", "momentum", changes, verify=False)), "the eager run fails"
