"""Checks of a state that is about to be loaded: all of them before anything is changed."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from commlib.core.context import CommContext
from commlib.errors import ArgumentError
from commlib.ops.agreement import Fact
from commlib.ops.lamb.checkpoint import STEP, names
from commlib.ops.lamb.lamb_rings import NAME
from commlib.ops.lamb.part import Part
from commlib.ops.lamb.settings import check_group, common_moments, group_facts

LOAD = f"{NAME}.load_state_dict"
NEEDED = ("params", "lr", "betas", "eps", "weight_decay")
REMEDY = "pass the state_dict() of an optimizer with the same parameters in the same groups"


class StateChecks:
    """The checks of one state; ``where`` is the start of the error texts."""

    def __init__(self, ring: CommContext, given: Any) -> None:
        self._where = ring._describe(LOAD)
        if not isinstance(given, Mapping) or not {"state", "param_groups"} <= {*given}:
            actual = sorted(given, key=str) if isinstance(given, Mapping) else type(given).__name__
            self._fail(str(actual), "keys state and param_groups")
        self._state, self._groups = given["state"], given["param_groups"]

    def facts(self) -> list[Fact]:
        """Return what all ranks must load alike, after the checks."""
        return [*group_facts(self._groups), Fact("number of updates", int(self._state[0][STEP]))]

    def groups(self, own: Sequence[Mapping[str, Any]]) -> None:
        """Raise unless the groups have the parameters of ``own``, and valid settings."""
        groups = self._groups
        if not isinstance(groups, list | tuple) or not all(isinstance(g, Mapping) for g in groups):
            self._fail(f"param_groups of {type(groups).__name__}", "a list of dictionaries")
        for number, group in enumerate(groups):
            missing = [name for name in NEEDED if name not in group]
            if missing:
                self._fail(f"group {number} lacks {missing}", f"the keys {list(NEEDED)}")
        sizes = [len(group["params"]) for group in groups]
        expected = [len(group["params"]) for group in own]
        if sizes != expected:
            self._fail(f"groups of {sizes} parameters", str(expected))
        numbers = [number for group in groups for number in group["params"]]
        if numbers != [*range(len(numbers))]:
            self._fail(f"groups of the parameters {numbers}", "each number once, in their order")
        for number, group in enumerate(groups):
            check_group(self._where, number, group)
        common_moments(self._where, groups)

    def state(self, parts: Sequence[Part], order: Sequence[int]) -> None:
        """Raise unless every parameter has a state of its shape, after one number of updates."""
        if not isinstance(self._state, Mapping):
            self._fail(f"a state of {type(self._state).__name__}", "a dictionary")
        others = [number for number in self._state if number not in order]
        if others:
            self._fail(f"a state of the parameters {others}", f"{len(order)} parameters from 0 on")
        steps = dict[int, list[int]]()
        for part in parts:
            for index, shape in enumerate(part.shapes):
                number = order[part.first + index]
                self._parameter(number, names(part), shape)
                steps.setdefault(int(self._state[number][STEP]), []).append(number)
        if len(steps) != 1 or min(steps) < 0:
            by_count = {count: sorted(numbers)[:3] for count, numbers in steps.items()}
            self._fail(f"numbers of updates of parameters {by_count}", "one number from 0 on")

    def _parameter(self, number: int, wanted: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        saved = self._state.get(number) or {}
        if not isinstance(saved, Mapping):
            self._fail(f"parameter {number} has {type(saved).__name__}", "a dictionary of tensors")
        for name, value in saved.items():
            if not isinstance(value, torch.Tensor):
                self._fail(f"{name} of parameter {number} is {type(value).__name__}", "a tensor")
        shapes = {name: tuple(value.shape) for name, value in saved.items()}
        expected = {STEP: (), **dict.fromkeys(wanted, shape)}
        if shapes != expected:
            self._fail(f"parameter {number} has {shapes or 'no state'}", str(expected))
        for name, value in saved.items():
            dtype = torch.int64 if name == STEP else torch.float32
            if value.dtype is not dtype:
                self._fail(
                    f"{name} of parameter {number} is {value.dtype}, as of another optimizer",
                    f"{dtype}",
                )

    def _fail(self, given: str, expected: str) -> NoReturn:
        raise ArgumentError(f"{self._where}: {given}; expected {expected}; {REMEDY}")


def check(
    ring: CommContext,
    parts: Sequence[Part],
    order: Sequence[int],
    groups: Sequence[Mapping[str, Any]],
    given: Any,
) -> list[Fact]:
    """Return what the ranks compare of a state.

    Raises:
        ArgumentError: ``given`` is not a state of these parameters.
    """
    checks = StateChecks(ring, given)
    checks.groups(groups)
    checks.state(parts, order)
    return checks.facts()
