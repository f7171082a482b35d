"""The entry of one key in a captured function: what its calls replay."""

from types import FrameType
from typing import Any, Protocol

from commlib.graph.cache_key import Arguments
from commlib.graph.captured_call import CapturedCall


class Entry(Protocol):
    """A captured call, or the slots of calls that gradients flow back through.

    Attributes:
        places: Where tensors lay at the capture that small lists and dicts hold.
    """

    places: dict[Any, Any]

    def run(self, call: Arguments, caller: FrameType, turn: int) -> Any:
        """Replay on the tensors of ``call`` and return the outputs."""

    @property
    def stale(self) -> bool:
        """Return True if the program has released a tensor that the graphs read."""

    @property
    def has_eager_parts(self) -> bool:
        """Return True if Python runs between its graphs."""

    @property
    def parts(self) -> list[CapturedCall]:
        """Return the captured calls that it is made of."""

    def uses(self, key: int) -> bool:
        """Return True if the graphs read or write the memory that ``key`` names, or bind it."""

    def drop_lost(self) -> bool:
        """Drop what has lost its graphs; returns whether anything has."""

    def release(self) -> None:
        """Release every graph."""
