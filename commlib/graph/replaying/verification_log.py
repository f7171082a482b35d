"""Results and cost of the verified calls of a captured call."""

from typing import Any

from commlib.graph.python.user_names import function_name
from commlib.graph.replaying.compare import Difference, Noise, Tolerance
from commlib.log import log


class VerificationLog:
    """The verified calls of one captured call.

    Attributes:
        tolerance: Relative and absolute, or None for the same bits.
        noise: What the function gives other bits of each time.
        verified: How many calls and backwards were verified.
        unsteady: How many replays had other last digits once.
        seconds: What that has cost.
        eager_seconds: Host time of the function, when last verified.
        uncaptured: Whether the next verified call answers "not captured", once.
    """

    def __init__(self, fn: Any, tolerance: Tolerance | None, noise: Noise) -> None:
        self._name = function_name(fn)
        self.tolerance, self.noise = tolerance, noise
        self.verified, self.unsteady, self.seconds = 0, 0, 0.0
        self.eager_seconds: float | None = None
        self.uncaptured = False

    def note_noise(self, noise: Noise) -> None:
        """Know further noise, and warn of results that are not compared any more, by name."""
        names = [name for item, name in noise.wild.items() if item not in self.noise.wild]
        self.noise.kinds.update(noise.kinds)
        self.noise.wild.update(noise.wild)
        if names:
            log.warning(
                "%s gives other values each time it is run, and verified calls do not compare "
                "these any more: %s. If it takes new data at each run, pass that as an argument",
                self._name,
                ", ".join(names),
            )

    @property
    def is_steady(self) -> bool:
        """Return True if at most one of eight verified replays had other last digits once."""
        return 8 * self.unsteady <= self.verified

    def note_unsteady(self, problem: Difference) -> None:
        """Count a replay that differed, and did not at a second look, and warn of it."""
        self.unsteady += 1
        log.warning(
            "a replay of %s gave other last digits once (%s), and those of the function the second "
            "time: an operator may add in any order",
            self._name,
            problem,
        )

    def note(self, seconds: float, eager_seconds: float) -> None:
        """Count a verified call.

        Args:
            seconds: What it has cost.
            eager_seconds: Host time of the function.
        """
        self.verified += 1
        self.seconds += seconds
        self.eager_seconds = eager_seconds
        if self.noise:
            log.once(
                "%s gives other bits each time it is run: numbers are compared by half of their "
                "digits; set tolerance=(rtol, atol) for another measure",
                self._name,
            )
