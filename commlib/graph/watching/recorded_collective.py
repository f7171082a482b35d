"""A collective that a run has made, in the terms that all ranks must share."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from commlib.core.observers import Seen
from commlib.core.ring import Ring
from commlib.graph.operators.program_line import user_line

_BY_OUTPUT = ("scatter", "broadcast")  # the input is the root's alone
_OWN_ITEMS = (  # differ between ranks
    "all_to_all",
    "exchange_rows",
    "expert_dispatch",
    "expert_scatter",
    "send",
    "recv",
)
PEER_TO_PEER = ("send", "recv")  # the other ranks do not make them


class Collective(NamedTuple):
    """One call of a collective, in the terms that all ranks must share."""

    ring: Ring
    collective: str
    dtype: str
    items: int
    rest: str  # reduction, root or peer
    where: str

    @classmethod
    def of(cls, call: Seen) -> "Collective":
        """Return the collective that an observer sees."""
        by_output = call.collective in _BY_OUTPUT and call.out is not None
        tensor = call.out if call.x is None or by_output else call.x
        dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
        items = 0 if tensor is None or call.collective in _OWN_ITEMS else tensor.numel()
        rest = "".join(f", {part}" for part in _shared(call.args))
        return cls(call.ring, call.collective, dtype, items, rest, user_line())

    def __str__(self) -> str:
        text = f"{self.collective} of {self.items} x {self.dtype}{self.rest}"
        return f"{text} on ring {self.ring.ring_id}"


def _shared(args: Sequence[Any]) -> Iterator[str]:
    """Yield what of a call's arguments all ranks have in common: root, reduction."""
    for arg in args:
        if isinstance(arg, int):
            yield str(arg)
        elif hasattr(arg, "op"):
            yield f"op {getattr(arg, 'name', None) or str(arg.op).rpartition('.')[2].lower()}"
