"""The collectives that a rank has made on one ring: number, fingerprint and the last few."""

import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commlib import flags

EVERY = 1000  # calls per window; fingerprints of whole windows are kept
RECENT = 32  # calls that are shown
_WINDOWS = 64  # windows whose fingerprints are kept
_KNOWN = 4096  # different calls whose codes are kept

PAIRED = frozenset(("send", "recv"))  # calls of two members; no other member makes them

# What every member must give alike, as a call states it: the collective, the number of elements,
# the dtype, the engine's reduction and the root. ``Facts`` has the meaning of each.
Entry = tuple[str, int | None, torch.dtype | None, Any, int | None]


def level() -> int:
    """Return how much a new ring compares: FLAGS_comm_check, or 2 under torch's DETAIL."""
    asked = int(flags.get(flags.CHECK))
    return 2 if dist.get_debug_level() == dist.DebugLevel.DETAIL else asked


class Facts(NamedTuple):
    """The values that must be equal on every member of one collective.

    ``elements`` is None if ranks may pass different sizes (``all_to_all`` with splits).
    """

    collective: str
    elements: int | None = None
    dtype: torch.dtype | None = None
    op: str | None = None
    root: int | None = None

    def __str__(self) -> str:
        """Return the call as it is shown: ``all_reduce float32 [4] op=sum``."""
        parts = [self.collective]
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        if self.elements is not None and self.dtype is not None:
            parts.append(f"[{self.elements}]")
        if self.op is not None:
            parts.append(f"op={self.op}")
        if self.root is not None:
            parts.append(f"root={self.root}")
        return " ".join(parts)

    @classmethod
    def of(cls, entry: Entry) -> "Facts":
        """Return the facts of an entry: those of its reduction's name."""
        collective, elements, dtype, reduction, root = entry
        op = None if reduction is None else getattr(reduction, "name", None) or reduction.op
        return cls(collective, elements, dtype, op, root)

    @property
    def code(self) -> int:
        """A number below 2**56 that is the same in every process; never 0."""
        digest = hashlib.blake2b(str(self).encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little") or 1


class Snapshot(NamedTuple):
    """The log at one moment. ``windows``: (calls made, fingerprint) at each full window."""

    number: int
    value: int
    windows: list[tuple[int, int]]
    recent: list[tuple[int, str]]
    captured: bool


class CallLog:
    """Numbers the collectives of one ring and folds them into a fingerprint.

    A call appends its entry to ``window``, and calls ``fold`` when it has ``EVERY`` of them. Both
    are done under the ring's lock. ``snapshot`` may be called from any thread.

    Attributes:
        window: The entries of the calls since the last full window.
        captured: A call was captured: its replays are not in the log.
    """

    __slots__ = ("_codes", "_state", "captured", "window")

    def __init__(self) -> None:
        self.captured = False
        self.window: list[Entry] = []
        self._codes: dict[Entry, int] = {}
        # Calls before the window, their fingerprint, the window, the end of the one before, and
        # the fingerprints of the windows so far: replaced as one, never changed.
        self._state = (0, 0, self.window, list[Entry](), list[tuple[int, int]]())

    def fold(self) -> None:
        """Close the window. A reader sees the state before or after, never half of it."""
        number, value, window, _, windows = self._state
        number, value = number + len(window), self._folded(value, window)
        self.window = []
        if len(self._codes) > _KNOWN:  # a program whose sizes never repeat
            self._codes.clear()
        history = [*windows[1 - _WINDOWS :], (number, value)]
        self._state = (number, value, self.window, window[-RECENT:], history)

    def snapshot(self) -> Snapshot:
        """Return number, fingerprint and last calls as they are now."""
        start, value, window, last, windows = self._state
        window = window[:]
        recent = [*last, *window][-RECENT:]
        number = start + len(window)
        first = number - len(recent) + 1
        shown = [(first + at, str(Facts.of(entry))) for at, entry in enumerate(recent)]
        return Snapshot(number, self._folded(value, window), windows, shown, self.captured)

    def _folded(self, value: int, entries: list[Entry]) -> int:
        """Return the fingerprint after more calls; hashes of whole numbers are equal everywhere."""
        return hash((value, *map(self._code, entries))) if entries else value

    def _code(self, entry: Entry) -> int:
        code = self._codes.get(entry)
        if code is None:
            code = self._codes[entry] = Facts.of(entry).code
        return code
