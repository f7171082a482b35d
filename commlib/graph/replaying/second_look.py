"""A second replay of a graph whose first one differed in last digits, where no run shows noise."""

from collections.abc import Callable, Sequence

from commlib.core.ring import Ring
from commlib.graph.replaying.compare import Difference
from commlib.graph.replaying.outcome import DIFFERS, EQUAL, worst
from commlib.graph.replaying.verification_log import VerificationLog


def second_look(
    rings: Sequence[Ring],
    problem: Difference | None,
    replay: Callable[[], Difference | None],
    log: VerificationLog,
    *,
    small: bool,
) -> Difference | None:
    """Return the difference that counts, of this member.

    An operator that adds in any order may do so in one run of hundreds: a replay differs, and no
    further run of the function does. It is a warning if numbers differ by less than half of their
    digits, and the second replay has the first further run's bits. Then nothing is noise.

    Args:
        rings: Those whose members do the same.
        problem: The difference of the first replay.
        replay: Makes one more replay, from where the further runs began. Returns how it differs.
        log: Gets the warning.
        small: Whether this member's first replay differs in last digits only.
    """
    if worst(rings, EQUAL if problem is None else DIFFERS) == EQUAL:
        return None
    if worst(rings, EQUAL if small else DIFFERS) == DIFFERS:
        return problem
    again = replay()
    if problem is not None and again is None:
        log.note_unsteady(problem)
    return again
