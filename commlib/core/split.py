"""Rings that are made of the members of a ring."""

from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from operator import index
from typing import Any

from typing_extensions import Self

from commlib.core.ring import Ring
from commlib.core.ring_ids import ring_ids
from commlib.deadlines import Deadline
from commlib.errors import ArgumentError

_NONE = -1  # sent for a color of None


class Split(Ring):
    """How the members of a ring form new rings."""

    def split(
        self,
        color: int | None,
        key: int = 0,
        *,
        timeout: float | timedelta | None = None,
        name: str = "",
    ) -> Self | None:
        """Form a new ring with the members that pass the same color; every member calls it.

        The new rings have ids from 524288 on, which no program has to choose. They do not end with
        this ring: close each with ``close()``, or all with ``commlib.shutdown()``. Blocks the host
        until every member has called it and the new ring is connected, at most ``timeout`` seconds
        per step.

        Args:
            color: A whole number >= 0, or None for a member that joins no new ring.
            key: Any whole number. The new ring has its members in the order of their keys; those
                with equal keys in the order of this ring.
            timeout: Of the new ring. Default: that of this ring.
            name: The program's own name of the new ring.

        Returns:
            The new ring on the device of this one; None for the color None.

        Raises:
            ArgumentError: ``color`` or ``key`` is another value. Nothing is sent and the ring stays
                usable. The other members wait, at most their timeout, for a correct call.
            MismatchError: Members have made different calls.
            CommTimeout: Naming the positions of the members that are late.
            RingError: The ring has failed or is closed, or another ring has the name.
        """
        wait = self.timeout if timeout is None else Deadline(timeout).seconds
        own = [_NONE if color is None else _checked(self, "color", color, 0)]
        own.append(_checked(self, "key", key, -(2**63)))
        rows = self._hosts.exchange(own, "split")
        places: dict[int, list[tuple[int, int]]] = {}
        for position, (given, order) in enumerate(rows):
            if given != _NONE:
                places.setdefault(given, []).append((order, position))
        return self._form([places[one] for one in sorted(places)], wait, name)

    def _form(self, places: list[list[tuple[int, int]]], seconds: float, name: str) -> Self | None:
        """Create this rank's ring of several; ``places``: key and position of their members."""
        # It makes the object that has this method, so it can't be imported above.
        manager: Any = import_module("commlib.core.manager").CommContextManager.instance()

        def taken(ring_id: int) -> bool:
            return manager.has(ring_id) or ring_id in manager._creating

        def exchange(values: Sequence[int]) -> list[list[int]]:
            return self._hosts.exchange(values, "split", "ids")

        ring = None
        for ring_id, group in enumerate(places, ring_ids.agree(len(places), exchange, taken)):
            positions = [position for _, position in sorted(group)]
            members = tuple(self.ranks[position] for position in positions)
            if self.rank in positions:
                place = {"device": self.device, "timeout": seconds}
                ring = manager.create(ring_id, members, name=name, **place)
            else:
                manager._table.elsewhere[ring_id] = members
        return ring


def _checked(ring: Ring, role: str, value: Any, least: int) -> int:
    """Return a whole number of 64 bits that is at least ``least``."""
    try:
        number = least - 1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = least - 1
    if least <= number < 2**63:
        return number
    limits = "from 0 to 2**63 - 1, or None to join no new ring" if least == 0 else "of 64 bits"
    raise ArgumentError(
        f"{ring._describe('split')}: {role}={value!r}; expected a whole number {limits}"
    )
