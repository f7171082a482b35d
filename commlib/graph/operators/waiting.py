"""Waits of a replay on a CPU for the collectives that it has begun.

A program may begin several and wait for them later. Two ranks that send to each other, for example,
both wait after their receive has begun. No operator shows such a wait, so a replay waits as late as
is safe: before the first step that needs the memory, or at the end. The end of a segment counts,
as nothing says which memory the eager part after it needs. Each wait has the timeout of its group
or ring.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch._ops import OpOverload

from commlib.graph.operators.overlap import overlap
from commlib.graph.operators.schema import OpCall
from commlib.graph.operators.step import Step, tensors_in


class Action(Protocol):
    """One action of a replay."""

    def again(self) -> None:
        """Do it once more."""


class Begin:
    """Begin a collective.

    Attributes:
        step: The collective.
        result: What its operator has returned, until the wait.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.result: Any = None

    def again(self) -> None:
        """Launch it; do not wait for it."""
        self.result = self.step.launch()


class End:
    """Wait for a collective that has begun."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin

    def again(self) -> None:
        """Block until it has finished, and keep its outputs."""
        result, self._begin.result = self._begin.result, None
        self._begin.step.end(result)


class _Use(NamedTuple):
    """The tensors that a step uses, and those among them that it may write."""

    tensors: list[torch.Tensor]
    written: list[torch.Tensor]

    def conflicts(self, later: "_Use") -> bool:
        """Return True if a later step must wait until this one has finished."""
        return _meet(self.written, later.tensors) or _meet(self.tensors, later.written)


def with_waits(steps: Sequence[Step]) -> list[Action]:
    """Return the actions of a replay of ``steps``: collectives are begun, and waited for later."""
    if not any(step.begins for step in steps):
        return list(steps)
    actions: list[Action] = []
    running: list[tuple[End, _Use]] = []
    for step, use in zip(steps, _uses(steps), strict=True):
        needed = [end for end, before in running if before.conflicts(use)]
        actions += needed
        running = [each for each in running if each[0] not in needed]
        if step.begins:
            begin = Begin(step)
            actions.append(begin)
            running.append((End(begin), use))
        else:
            actions.append(step)
    return [*actions, *(end for end, _ in running)]


def _uses(steps: Sequence[Step]) -> list[_Use]:
    """Return what each step uses. The first call of a group makes the calls after it."""
    uses: list[_Use] = []
    group = _Use([], [])  # of calls whose first call is before them
    for step in reversed(steps):
        use = _use(step)
        if step.seen is not None:
            use = _Use(use.tensors + group.tensors, use.written + group.written)
            group = _Use([], []) if step.seen.leads else use
            use = use if step.seen.leads else _Use([], [])
        uses.append(use)
    return uses[::-1]


def _use(step: Step) -> _Use:
    made = [tensor for _, tensor in step.made]
    tensors = [*tensors_in((step.args, step.kwargs)), *made]
    if step.seen is not None:
        return _Use(tensors, tensors_in(step.seen.out))
    if step.call is torch.ops.c10d.send.default:
        return _Use(tensors, [])
    if step.begins or not isinstance(step.call, OpOverload):
        return _Use(tensors, tensors)  # the schemas of collectives do not say what they write
    call = OpCall(step.call, step.args, step.kwargs)
    if call.known.only_views or _takes_shape(step.call):
        return _Use(made, made)
    return _Use(tensors, [*call.written, *made])


def _takes_shape(op: Any) -> bool:
    """Return True for an operator that reads no value of a tensor, only its shape and dtype."""
    name = str(op.name()).partition("::")[2].partition(".")[0]
    return name.endswith("_like") or name.startswith("new_")


def _meet(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Return True if a tensor of one may share an element with one of the other."""
    return any(overlap(one, other) for one in some for other in others)
