"""Results and cost of the verified calls of a captured call."""

from typing import Any

from commlib.graph.python.user_names import function_name
from commlib.graph.replaying.compare import Noise, Tolerance
from commlib.log import log


class VerificationLog:
    """The verified calls of one captured call.

    Attributes:
        tolerance: Relative and absolute, or None for the same bits.
        noise: What the function gives other bits of each time.
        verified: How many calls and backwards were verified.
        seconds: What that has cost.
        eager_seconds: Host time of the function, when last verified.
        uncaptured: Whether the next verified call answers "not captured", once.
    """

    def __init__(self, fn: Any, tolerance: Tolerance | None, noise: Noise) -> None:
        self._name = function_name(fn)
        self.tolerance, self.noise = tolerance, noise
        self.verified, self.seconds = 0, 0.0
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
