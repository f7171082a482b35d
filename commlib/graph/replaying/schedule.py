"""The schedule of verified replays, the same on all members of a ring."""

from commlib import flags
from commlib.errors import GraphError

_FIRST = (1, 2)  # replays that the default schedule verifies first


class Schedule:
    """The replays of a key that are verified.

    ``"auto"`` selects the first two, then every power of ten. A number N selects every N-th.
    """

    def __init__(self, verify: "bool | int | str | None") -> None:
        """``None`` uses FLAGS_graph_verify."""
        if verify is None:
            verify = flags.get(flags.GRAPH_VERIFY)
        if not (verify == "auto" or isinstance(verify, bool) or _is_count(verify)):
            raise GraphError(
                f"verify={verify!r}: expected 'auto', True, False or a whole number N for every "
                f"N-th replay"
            )
        self._auto, self._every = verify == "auto", 0 if verify == "auto" else int(verify)

    @property
    def ever(self) -> bool:
        """Return True if any replay is verified."""
        return self._auto or self._every > 0

    def due(self, number: int) -> bool:
        """Return True if replay ``number``, counted from 1, is verified."""
        if self._auto:
            return number in _FIRST or (number % 10 == 0 and _is_power_of_ten(number))
        return self._every > 0 and number % self._every == 0


def _is_count(x: object) -> bool:
    return isinstance(x, int) and x >= 0


def _is_power_of_ten(number: int) -> bool:
    while number >= 10 and number % 10 == 0:
        number //= 10
    return number == 1
