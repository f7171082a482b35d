"""The outcome of a verified call, here and on the other members of its rings."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from commlib.core.ring import Ring
from commlib.errors import GraphError
from commlib.graph.replaying.compare import Difference

EQUAL, DIFFERS, RAISED = range(3)  # what a member says of its call


class Unequal(GraphError):
    """A replay differed from the function; ``result`` is what the function returned."""

    def __init__(self, difference: Difference, cause: str, result: Any) -> None:
        super().__init__(
            f"the replay differs from the eager call: {difference}; {cause}. The effects of the "
            f"eager call were kept: do not repeat it"
        )
        self.result = result

    def public(self) -> GraphError:
        """Return the error that the program gets, under the name that it knows."""
        error = GraphError(str(self), done=True)
        error.result = self.result
        return error


class Verified(NamedTuple):
    """Result of a verified call.

    Attributes:
        expected: What the function returned.
        found: What the replay returned: the same. Where none counts, what the function returned.
        eager_seconds: Host time of the function.
        seconds: What all of it has cost.
        replayed: Whether the replay counts.
    """

    expected: Any
    found: Any
    eager_seconds: float
    seconds: float
    replayed: bool


def worst(rings: Iterable[Ring], said: int) -> int:
    """Return the worst outcome among this member and those of its rings."""
    for ring in rings:
        said = max(row[0] for row in ring._hosts.exchange([said]))
    return said


def elsewhere(rings: Sequence[Ring]) -> Difference:
    """Return the difference that another member has reported."""
    numbers = ", ".join(str(ring.ring_id) for ring in rings)
    return Difference(("replay", 1), "a replay", f"differs on another rank of ring {numbers}")
