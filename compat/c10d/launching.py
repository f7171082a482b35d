"""Launching of a group's calls on its ring: alone, as one operation, or in a batch."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from commlib.compat.c10d.work import GroupWork
from commlib.core.context import CommContext
from commlib.core.modes import watched
from commlib.errors import ArgumentError, DeviceError

Tensor = torch.Tensor
Call = Callable[..., Any]  # of a collective of the ring; takes its stream options

ASYNC: dict[str, Any] = {"use_calc_stream": False, "sync_op": False}


@dataclass(slots=True)
class Step:
    """Calls of a ring that are one operation; or each by itself, with lists of tensors."""

    calls: Sequence[Call]
    tensors: list[Tensor]
    lists: bool = False


@dataclass(slots=True)
class Batch:
    """The steps that a thread issues between the start and the end of coalescing."""

    ring: CommContext | None = None
    steps: list[Step] = field(default_factory=list)

    def add(self, ring: CommContext, step: Step) -> None:
        """Add a step.

        Raises:
            DeviceError: The steps before it are on another device.
            ArgumentError: It has lists of tensors, which no group of a ring takes.
        """
        if self.ring not in (None, ring):
            raise DeviceError(
                f"{ring._describe('coalescing')}: calls on {ring.device} and on another device; "
                f"coalesce the calls of each device"
            )
        if step.lists:
            raise ArgumentError(
                f"{ring._describe('coalescing')}: a call with a list of tensors; call it outside "
                f"of the block, or pass one tensor of all parts"
            )
        self.ring = ring
        self.steps.append(step)

    def step(self) -> Step:
        """Return all steps as one."""
        calls = [call for step in self.steps for call in step.calls]
        return Step(calls, [tensor for step in self.steps for tensor in step.tensors])


def launch(ring: CommContext, step: Step, limit: float | None = None) -> None:
    """Launch a step in the order of the caller's stream; on a CPU, block until it has ended."""
    with _without_modes():
        _calls(ring, step, {} if limit is None else {"timeout": limit})


def launch_async(
    ring: CommContext, step: Step, limit: float | None = None, kind: type[GroupWork] = GroupWork
) -> GroupWork:
    """Launch a step on the ring's own stream, or on a CPU without waiting for it.

    Args:
        ring: The ring.
        step: What to launch.
        limit: Seconds until the calls must have ended; None for the ring's timeout.
        kind: The class of the work.
    """
    mode = ASYNC if limit is None else {**ASYNC, "timeout": limit}
    with _without_modes():
        return kind(ring, _calls(ring, step, mode), step.tensors)


def _calls(ring: CommContext, step: Step, mode: dict[str, Any]) -> list[Any]:
    """Launch the calls; returns their works in an asynchronous mode."""
    if step.lists or len(step.calls) == 1:
        return [call(**mode) for call in step.calls]
    with ring.group(**mode) as work:
        for call in step.calls:
            call()
    return [work]


def _without_modes() -> Any:
    """Hide dispatch modes of the program: they watch operators, and these calls have none."""
    return _disable_current_modes() if watched() else nullcontext()
