"""Rings that are made of the members of a ring."""

from datetime import timedelta
from operator import index
from typing import Any, Self

from commlib.core.ring import Ring
from commlib.core.rings.ids import numbers, ring_id
from commlib.deadlines import Deadline
from commlib.errors import ArgumentError
from commlib.rendezvous.identity import Remedy

_NONE = -1  # sent for a color of None


class Split(Ring):
    """The split of a ring's members into new rings."""

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
        request = [_NONE if color is None else _checked(self, "color", color, 0)]
        request.append(_checked(self, "key", key, -(2**63)))
        rows = self._hosts.exchange([*request, numbers.draw()], "split")
        places: dict[int, list[tuple[int, int]]] = {}
        for position, (row_color, order, _) in enumerate(rows):
            if row_color != _NONE:
                places.setdefault(row_color, []).append((order, position))
        groups = [places[one] for one in sorted(places)]
        return self._form(groups, [drawn for _, _, drawn in rows], wait, name)

    def _form(
        self, groups: list[list[tuple[int, int]]], drawn: list[int], seconds: float, name: str
    ) -> Self | None:
        """Create this rank's ring of several.

        Args:
            groups: Key and position of the members of each new ring.
            drawn: The number that each member has drawn.
            seconds: The timeout of the new ring.
            name: Its name.
        """
        firsts = [min(position for _, position in group) for group in groups]
        ring, create = None, f"commlib.comm({self.ring_id}).split(...) on all of its members"
        ids = self._free_ids(firsts, drawn) if groups else []
        for new_id, group in zip(ids, groups, strict=True):
            positions = [position for _, position in sorted(group)]
            members = tuple(self.ranks[position] for position in positions)
            if self.rank in positions:
                ring = self._source.create(
                    new_id,
                    members,
                    device=self.device,
                    timeout=seconds,
                    name=name,
                    remedy=Remedy(f"commlib.close_ring({new_id})", create),
                )
            else:
                self._source._table.elsewhere[new_id] = members
        return ring

    def _free_ids(self, firsts: list[int], drawn: list[int]) -> list[int]:
        """Return an id for each new ring, from the number that its first member has drawn.

        No other new ring has the same, also in other threads. Only a ring that the program has
        numbered so itself may have it, on some members: then all members draw once more.
        """
        source = self._source
        size = source._world().size
        while True:
            ids = [ring_id(drawn[at], self.ranks[at], size) for at in firsts]
            free = not any(source.has(one) or one in source._creating for one in ids)
            rows = self._hosts.exchange([free, numbers.draw()], "split", "ids")
            if all(is_free for is_free, _ in rows):
                return ids
            drawn = [number for _, number in rows]


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
