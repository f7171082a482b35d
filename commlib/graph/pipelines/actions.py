"""Parts of a pipeline schedule: actions, and moves between ranks."""

from typing import Any, Literal, NamedTuple, TypeAlias

from commlib.errors import GraphError

Kind: TypeAlias = Literal["forward", "backward"]


class Action(NamedTuple):
    """One forward or backward of a microbatch through a stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"


class PipelineMove(NamedTuple):
    """A tensor that passes to another rank: an activation, or the gradient of one.

    Attributes:
        source: Rank that sends it.
        target: Rank that receives it.
        use: Action that it is for.
    """

    source: int
    target: int
    use: Action


def action_of(given: Any) -> Action:
    """Return an action that a program has given. Raises ``GraphError`` for what is none."""
    is_action = isinstance(given, (tuple, list)) and len(given) == 3
    if not is_action or any(isinstance(x, bool) or not isinstance(x, int) for x in given[1:]):
        raise GraphError(
            f"the schedule has {given!r:.60}; expected (kind, stage, microbatch), with whole "
            f"numbers and kind forward or backward"
        )
    return Action(*given)


def following(action: Action) -> Action:
    """Return the action that uses the result of ``action``; its stage may not exist."""
    step = 1 if action.kind == "forward" else -1
    return action._replace(stage=action.stage + step)


def needs(action: Action, stages: int) -> list[Action]:
    """Return what must have run before an action."""
    if action.kind == "forward":
        return [action._replace(stage=action.stage - 1)] if action.stage else []
    after = [action._replace(stage=action.stage + 1)] if action.stage + 1 < stages else []
    return [action._replace(kind="forward"), *after]
