"""The ring of a registered op: its size and rank as arguments, and checks when the op runs."""

from collections.abc import Callable
from typing import Any

from commlib.core.context import CommContext
from commlib.core.group import needs_result
from commlib.core.manager import _rings, comm
from commlib.errors import RingError


def size_of(ring_id: int) -> int:
    """Return the number of ranks of ring ``ring_id``; 0 if it does not exist here.

    Plain look-ups let torch.compile guard on the result. An op called with size 0 raises the
    error of ``comm(ring_id)``.
    """
    ring = _rings.get(ring_id)
    return 0 if ring is None else ring.size


def rank_of(ring_id: int) -> int:
    """Return this rank's position in ring ``ring_id``; -1 if it does not exist here."""
    ring = _rings.get(ring_id)
    return -1 if ring is None else ring.rank


def sized(collective: str, ring_id: int, size: int, rank: int | None = None) -> CommContext:
    """Return ring ``ring_id`` after checking that it is the ring of the trace.

    Args:
        collective: Name of the operator, for the error.
        ring_id: The ring.
        size: Its number of ranks when the call was traced, or when forward ran.
        rank: This rank's position then; None where the operator does not depend on it.

    Raises:
        RingError: The ring does not exist, or was created again with another size or order.
    """
    ring = comm(ring_id)
    if ring.size == size and rank in (None, ring.rank):
        return ring
    before = f"{size} ranks" if rank is None else f"rank {rank} of {size}"
    now = f"{ring.size} ranks" if rank is None else f"rank {ring.rank} of {ring.size}"
    raise RingError(
        f"{ring._describe(collective)}: the call was traced, or its forward ran, with {before}; "
        f"expected the ring's {now}: it was created again since then. Trace the call again, and "
        f"run backward before the ring is closed"
    )


def outside_group(overload: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` with a check that raises inside ``ring.group()``.

    Compiled code and autograd use a result at once; a group launches only at its end. An
    eager call under a mode also takes its registered op, and returns the op's result.
    """
    names = [argument.name for argument in overload._schema.arguments]
    if "ring_id" not in names:
        return run
    position, collective = names.index("ring_id"), overload._schema.name.partition("::")[2]

    def outside(*args: Any) -> Any:
        ring = _rings.get(args[position])
        if ring is not None and ring._open_group is not None and not ring._open_group.takes_op():
            needs_result(ring, collective)
        return run(*args)

    return outside
