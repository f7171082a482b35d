"""The rings of a process by their ids, and the error of an id that is not there."""

import os
from collections.abc import Iterable
from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.membership import belongs
from commlib.engines.reduction_names import NAMES
from commlib.errors import ArgumentError, RingError


class RingTable:
    """The rings of this process, and what became of those that are not there.

    Attributes:
        open: The rings by their ids, in the order of their creation; always the same dict.
        closed: Ids of rings that were closed.
        elsewhere: Members of rings that this rank is not a member of.
        inherited: Ids of rings of the process that forked this one, with its process id.
    """

    def __init__(self) -> None:
        self.open: dict[int, CommContext] = {}
        self.closed: set[int] = set()
        self.elsewhere: dict[int, tuple[int, ...]] = {}
        self.inherited: dict[int, int] = {}

    def add(self, ring: CommContext) -> None:
        """Add a new ring."""
        self.open[ring.ring_id] = ring
        self.closed.discard(ring.ring_id)
        self.elsewhere.pop(ring.ring_id, None)
        self.inherited.pop(ring.ring_id, None)

    def take(self, ring_id: int | None) -> list[CommContext]:
        """Remove a ring, or all in reverse order of creation; they count as closed."""
        chosen = list(reversed(self.open)) if ring_id is None else [ring_id]
        rings = [self.open.pop(one) for one in chosen if one in self.open]
        self.closed.update(ring.ring_id for ring in rings)
        if ring_id is None:
            self.elsewhere.clear()
        return rings

    def forget(self, parent: int, closing: Iterable[CommContext], creating: Iterable[int]) -> None:
        """Take every ring of the process ``parent`` out in a forked child; nothing is closed.

        Args:
            parent: The number of the process.
            closing: Rings that are not in the table any more.
            creating: Ids of rings that are not in it yet.
        """
        why = belongs(parent, os.getpid())
        for ring in [*self.open.values(), *closing]:
            ring._forget(why)
        self.inherited.update(dict.fromkeys([*self.open, *creating], parent))
        self.open.clear()  # the same dict: lookups hold it

    def check_known(self, ring_id: int) -> None:
        """Refuse an id that no ring here has or had."""
        if ring_id not in self.open and ring_id not in self.closed:
            raise self.unknown(ring_id)

    def get(self, ring: "int | str | CommContext") -> CommContext:
        """Return a ring by its id or its name; a ring itself is returned if it is open.

        Raises:
            RingError: There is no such ring on this rank; the text lists those that exist.
        """
        if isinstance(ring, CommContext):
            if ring._health.ended:
                raise ring._health.unusable("a call")
            return ring
        try:
            return self.open[self.number(ring)]
        except (KeyError, TypeError):
            raise self.unknown(ring) from None

    def number(self, ring: Any) -> Any:
        """Return the id of a ring by its id, its name or itself; an unknown name is returned."""
        if isinstance(ring, CommContext):
            return ring.ring_id
        named = isinstance(ring, str) and ring
        ring_ids = [one.ring_id for one in list(self.open.values()) if named and one.name == ring]
        return ring_ids[0] if ring_ids else ring

    def is_replaced(self, ring: Any) -> bool:
        """Return True for a ring object that is not in the table, whatever ring has its id."""
        return isinstance(ring, CommContext) and self.open.get(ring.ring_id) is not ring

    def unknown(self, ring_id: Any) -> RingError:
        """Return the error of an id that is not the id of a ring here."""
        if isinstance(ring_id, torch.Tensor):
            return RingError(
                f"ring_id is a tensor of shape {tuple(ring_id.shape)}; expected a whole number; "
                f"rings here: {self.ids()}; pass the output as out=, or ring_id=ring.ring_id"
            )
        if not hasattr(ring_id, "__index__") or ring_id < 0:
            return RingError(
                f"ring_id={ring_id!r}: expected a whole number >= 0 or the name of a ring; rings "
                f"here: {self.ids()}; names: {self.names()}{_hint(ring_id)}"
            )
        if ring_id in self.elsewhere:
            members = list(self.elsewhere[ring_id])
            return RingError(
                f"this rank is not a member of ring {ring_id} ({members}); rings here: "
                f"{self.ids()}; call it on its members alone: new_ring returns None elsewhere"
            )
        if ring_id in self.inherited:
            return RingError(f"ring {ring_id} {belongs(self.inherited[ring_id], os.getpid())}")
        if ring_id == 0 and not self.open:
            hint = "call commlib.init() first"
        else:
            hint = f"call commlib.new_ring({ring_id}, ranks) on its members first"
        state = "was closed" if ring_id in self.closed else "does not exist on this rank"
        return RingError(f"ring {ring_id!r} {state}; rings here: {self.ids()}; {hint}")

    def ids(self) -> list[int]:
        """Return the ids of the rings on this rank, in the order of their creation."""
        return [ring_id for ring_id, ring in self.open.items() if not ring._health.ended]

    def names(self) -> list[str]:
        """Return the names of the rings on this rank that have one."""
        rings = list(self.open.values())
        return [ring.name for ring in rings if ring.name and not ring._health.ended]

    def usable(self, ring_id: int) -> CommContext | None:
        """Return the ring if it exists; drop all that were aborted or closed by their own method.

        Their ids and names are free, and ids that are never used again keep no memory.
        """
        for ended in [ring for ring in self.open.values() if ring._health.ended]:
            del self.open[ended.ring_id]
            self.closed.add(ended.ring_id)
        entry = self.open.get(ring_id)
        if entry is not None and entry._health.fault is not None:
            raise RingError(f"ring {ring_id} exists and can't be used: {entry._health.fault}")
        return entry

    def check_name(self, ring_id: int, name: str) -> None:
        """Refuse a name that is not text, or that another ring has."""
        if not isinstance(name, str):
            raise ArgumentError(f"ring {ring_id}: name={name!r}; expected a str")
        for other in self.open.values():
            if name and other.name == name and other.ring_id != ring_id:
                raise RingError(
                    f"ring {ring_id}: the name {name!r} belongs to ring {other.ring_id}; choose "
                    f"another, or call commlib.close_ring({other.ring_id}) first"
                )


def _hint(ring_id: Any) -> str:
    """Return what to pass in place of a ``ring_id`` that is the name of a reduction."""
    is_reduction = isinstance(ring_id, str) and ring_id.lower() in NAMES
    return f"; pass op={ring_id!r} for a reduction" if is_reduction else ""
