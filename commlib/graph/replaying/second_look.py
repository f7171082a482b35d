"""A second replay of a graph whose first one differed in last digits, where no run shows noise."""

from collections.abc import Callable, Sequence

from commlib.core.ring import Ring
from commlib.graph.replaying.compare import Comparison, Difference, Left
from commlib.graph.replaying.outcome import DIFFERS, EQUAL, worst
from commlib.graph.replaying.verification_log import VerificationLog


def second_look(
    rings: Sequence[Ring],
    problem: Difference | None,
    real: Left,
    first: Left | None,
    comparisons: tuple[Comparison, Comparison],
    replay: Callable[[], Left | None],
    log: VerificationLog,
) -> Difference | None:
    """Return the difference that counts, of this member.

    An operator that adds in any order may do so in one run of hundreds: a replay differs, and no
    further run of the function does. If numbers differ by less than half of their digits and the
    second replay has the bits of the function, it is a warning, and nothing is known as noise.

    Args:
        rings: Those whose members do the same.
        problem: The difference of the first replay.
        real: What the function has left.
        first: What the first replay has left; None if there is to be no second one.
        comparisons: By bits, and by half of the digits.
        replay: Makes one more replay; None if that fails.
        log: Gets the warning.
    """
    by_bits, by_half = comparisons
    if worst(rings, EQUAL if problem is None else DIFFERS) == EQUAL:
        return None
    small = first is not None and not any(True for _ in by_half.differences(real, first))
    if worst(rings, EQUAL if small else DIFFERS) == DIFFERS:
        return problem
    second = replay()
    if second is None:
        return problem or Difference(("replay", 0), "a second replay", "fails")
    again = next(by_bits.differences(real, second), None)
    if problem is not None and again is None:
        log.note_unsteady(problem)
    return again
