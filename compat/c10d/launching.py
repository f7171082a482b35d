"""How the calls of a group are launched on its ring: alone, as one operation, or in a batch."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from commlib.compat.c10d.work import GroupWork
from commlib.core.context import CommContext
from commlib.core.modes import watched
from commlib.core.observers import begun
from commlib.core.work import OnStream, Work
from commlib.deferred import release_deferred
from commlib.errors import DeviceError
from commlib.streams import capture_of, stream_captures

Tensor = torch.Tensor
Call = Callable[..., Any]  # of a collective of the ring; takes its stream options

ASYNC = {"use_calc_stream": False, "sync_op": False}


@dataclass(slots=True)
class Step:
    """Calls of a ring, and what is left to do when they have ended."""

    calls: Sequence[Call]
    tensors: list[Tensor]
    finish: Callable[[], None] | None = None


@dataclass(slots=True)
class Batch:
    """The steps that a thread issues between the start and the end of coalescing."""

    ring: CommContext | None = None
    steps: list[Step] = field(default_factory=list)

    def add(self, ring: CommContext, step: Step) -> None:
        """Add a step.

        Raises:
            DeviceError: The steps before it are on another device.
        """
        if self.ring not in (None, ring):
            raise DeviceError(
                f"{ring._describe('coalescing')}: calls on {ring.device} and on another device; "
                f"coalesce the calls of each device"
            )
        self.ring = ring
        self.steps.append(step)

    def step(self) -> Step:
        """Return all steps as one."""
        finishes = [step.finish for step in self.steps if step.finish is not None]

        def finish() -> None:
            for one in finishes:
                one()

        calls = [call for step in self.steps for call in step.calls]
        tensors = [tensor for step in self.steps for tensor in step.tensors]
        return Step(calls, tensors, finish if finishes else None)


def launch(ring: CommContext, step: Step) -> None:
    """Launch a step in the order of the caller's stream; on a CPU, block until it has ended."""
    with _without_modes():
        _calls(ring, step, {})
        if step.finish is not None:
            step.finish()


def launch_async(
    ring: CommContext, step: Step, limit: float | None = None, kind: type[GroupWork] = GroupWork
) -> GroupWork:
    """Launch a step on the ring's own stream, or on a CPU without waiting for it.

    Args:
        ring: The ring.
        step: What to launch.
        limit: Seconds of the waits on a host; None for the ring's timeout.
        kind: The class of the work.
    """
    with _without_modes():
        if ring.stream is None or step.finish is None:
            work = _calls(ring, step, ASYNC)
            return kind(ring, work, step.tensors, finish=step.finish, limit=limit)
        return kind(ring, _on_comm_stream(ring, ring.stream, step), step.tensors, limit=limit)


def _calls(ring: CommContext, step: Step, mode: dict[str, bool]) -> Any:
    if len(step.calls) == 1:
        return step.calls[0](**mode)
    with ring.group(**mode) as work:
        for call in step.calls:
            call()
    return work


def _on_comm_stream(ring: CommContext, comm: torch.cuda.Stream, step: Step) -> Work:
    """Launch a step that ends with copies: all of it runs on the ring's stream."""
    calc = torch.cuda.current_stream(ring.device)
    capture = capture_of(calc.cuda_stream)
    if not stream_captures():
        release_deferred()
    comm.wait_stream(calc)
    with torch.cuda.stream(comm):
        _calls(ring, step, {})
        assert step.finish is not None
        step.finish()
    event = torch.cuda.Event()
    event.record(comm)
    return begun(Work(None, OnStream(event, calc, step, capture)))


def _without_modes() -> Any:
    """Hide dispatch modes of the program: they watch operators, and these calls have none."""
    return _disable_current_modes() if watched() else nullcontext()
