"""The entries of a captured function: by the key of a call, what is replayed for it."""

from collections import Counter
from types import FrameType
from typing import Any, Protocol

from commlib import flags
from commlib.errors import GraphError
from commlib.graph.calls.cache_key import Arguments
from commlib.graph.calls.tensor_places import Places
from commlib.graph.recording.replay_times import FunctionTimes
from commlib.graph.replaying.captured_call import CapturedCall


class Entry(Protocol):
    """A captured call, or the slots of calls that gradients flow back through.

    Attributes:
        places: Where the program held tensors that it uses, and their memory, at the capture.
    """

    places: Places

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


_FEW = 4  # replays of a graph whose tensors are replaced all the time
_OFTEN = 8  # times that this happens


class Entries(dict[Any, Entry]):
    """The entries by key.

    Attributes:
        times: When the last replays began and ended, also those of entries that were released;
            None if none is timed.
    """

    def __init__(self) -> None:
        super().__init__()
        most: int = flags.get(flags.GRAPH_DRIFT)
        self.times = FunctionTimes(most) if most else None
        self._replaced: Counter[Any] = Counter()  # by key: graphs whose tensors were replaced

    @property
    def replays(self) -> int:
        """Return how many calls were replayed."""
        return sum(part.replays for entry in self.values() for part in entry.parts)

    @property
    def captured(self) -> list[CapturedCall]:
        """Return the captured calls of all entries."""
        return [part for entry in self.values() for part in entry.parts]

    def drop(self, key: Any) -> None:
        """Release the graphs of a key, if there are any."""
        entry = self.pop(key, None)
        if entry is not None:
            entry.release()

    def drop_lost(self, key: Any, entry: Entry | None) -> bool:
        """Drop the graphs of an entry that could not be captured again; return True if any."""
        if entry is None or not entry.drop_lost():
            return False
        if not entry.parts:
            self.pop(key, None)
        return True

    def drop_stale(self, key: Any, entry: Entry, name: str) -> GraphError | None:
        """Release the graphs of an entry whose tensors were replaced, if it is still there.

        Returns:
            An error that names the function where that happens at nearly every call, so that
            capturing again gains nothing.
        """
        if self.get(key) is not entry:  # another thread was first
            return None
        used = sum(part.replays for part in entry.parts)
        self.drop(key)
        self._replaced[key] = self._replaced[key] + 1 if used < _FEW else 1
        if self._replaced[key] <= _OFTEN:
            return None
        return GraphError(
            f"{name}: a tensor that the function uses is replaced by another at nearly every call; "
            f"write into its memory instead (copy_)"
        )

    def drop_all(self) -> None:
        """Release every graph."""
        for entry in [*self.values()]:  # at the end of a program other threads may still call
            entry.release()
        self.clear()
