"""The collectives that a rank has made on one ring: number, fingerprint and the last few."""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commlib import flags

EVERY = 1000  # calls per window; fingerprints of whole windows are kept
RECENT = 32  # calls that are shown
_WINDOWS = 64  # windows whose fingerprints are kept
_KNOWN = 4096  # different calls whose facts are kept

PAIRED = frozenset(("send", "recv"))  # calls of two members; no other member makes them
_ROOTED = frozenset(("broadcast", "reduce", "gather", "scatter"))
_REDUCED = frozenset(("all_reduce", "reduce_scatter", "reduce"))
_PLAIN = _ROOTED | _REDUCED | PAIRED | {"all_gather"}  # verbs whose arguments decide their facts


def level() -> int:
    """Return how much a new ring compares: FLAGS_comm_check, or 2 under torch's DETAIL."""
    asked = int(flags.get(flags.CHECK))
    return 2 if dist.get_debug_level() == dist.DebugLevel.DETAIL else asked


class Facts(NamedTuple):
    """What must be equal on every member that makes one collective.

    ``elements`` is None where every member may give another one (``all_to_all`` with splits).
    """

    verb: str
    elements: int | None = None
    dtype: torch.dtype | None = None
    op: str | None = None
    root: int | None = None

    def __str__(self) -> str:
        """Return the call as it is shown: ``all_reduce float32 [4] op=sum``."""
        parts = [self.verb]
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        if self.elements is not None and self.dtype is not None:
            parts.append(f"[{self.elements}]")
        if self.op is not None:
            parts.append(f"op={self.op}")
        if self.root is not None:
            parts.append(f"root={self.root}")
        return " ".join(parts)

    @property
    def code(self) -> int:
        """A number below 2**56 that is the same in every process; never 0."""
        digest = hashlib.blake2b(str(self).encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little") or 1


def facts(
    verb: str,
    launch: Callable[..., Any],
    args: tuple[Any, ...],
    out: torch.Tensor | None,
    x: torch.Tensor | None,
    size: int,
) -> Facts:
    """Return what every member must give alike, from the call of one member."""
    tensor = out if x is None else x
    if tensor is None:
        return Facts(verb)
    count: int | None = tensor.numel()
    if verb == "all_to_all":
        count = None if getattr(launch, "__name__", "") == "all_to_all" else count
    elif verb == "exchange_rows":
        count = args[0].most * tensor.shape[1]
    elif verb == "scatter" and x is not None:
        count = x.numel() // size
    op = None
    if verb in _REDUCED:
        reduction = args[-1]
        op = str(getattr(reduction, "name", None) or reduction.op)
    return Facts(verb, count, tensor.dtype, op, args[0] if verb in _ROOTED else None)


class Snapshot(NamedTuple):
    """The log at one moment. ``windows``: (calls made, fingerprint) at each full window."""

    number: int
    value: int
    windows: list[tuple[int, int]]
    recent: list[tuple[int, str]]
    captured: bool


class CallLog:
    """Numbers the collectives of one ring and folds them into a fingerprint.

    ``note`` is called under the ring's lock. ``snapshot`` may be called from any thread.
    """

    __slots__ = (
        *("_capturing", "_known", "_size", "_state", "_texts", "_window"),
        *("captured", "note"),
    )

    def __init__(self, size: int, capturing: Callable[[], bool] | None) -> None:
        """``capturing`` returns True if the current stream is captured; None on a CPU."""
        self.captured = False
        self.note = self._note if capturing is None else self._note_unless_captured
        self._size, self._capturing = size, capturing
        self._known: dict[Any, int] = {}
        self._texts: dict[int, str] = {}
        self._window: list[int] = []
        # Calls before the window, their fingerprint, the window, the end of the one before, and
        # the fingerprints of the windows so far: replaced as one, never changed.
        self._state = (0, 0, self._window, list[int](), list[tuple[int, int]]())

    def _note_unless_captured(self, *call: Any) -> None:
        """Leave captured calls out: the replays of a graph are not seen here."""
        if self._capturing is not None and self._capturing():
            self.captured = True
        else:
            self._note(*call)

    def _note(
        self,
        verb: str,
        launch: Callable[..., Any],
        args: tuple[Any, ...],
        out: torch.Tensor | None,
        x: torch.Tensor | None,
    ) -> None:
        """Add a collective; sends and receives are left out."""
        tensor = out if x is None else x
        try:
            code = self._known[verb, tensor.numel(), tensor.dtype, args]  # type: ignore[union-attr]
        except (KeyError, TypeError, AttributeError):
            code = self._learn(verb, launch, args, out, x)
        if not code:  # a send or a receive
            return
        window = self._window
        window.append(code)
        if len(window) == EVERY:
            self._fold()

    def _learn(
        self,
        verb: str,
        launch: Callable[..., Any],
        args: tuple[Any, ...],
        out: torch.Tensor | None,
        x: torch.Tensor | None,
    ) -> int:
        """Return the code of a call; keep it unless its arguments hold tensors."""
        fact = facts(verb, launch, args, out, x, self._size)
        code = self._known.get(fact)
        if code is None:
            code = self._known[fact] = 0 if verb in PAIRED else fact.code
        tensor = out if x is None else x
        if verb in _PLAIN and tensor is not None:
            self._known[verb, tensor.numel(), tensor.dtype, args] = code
        self._texts[code] = str(fact)
        return code

    def _fold(self) -> None:
        """Close the window. A reader sees the state before or after, never half of it."""
        number, value, window, _, windows = self._state
        number, value = number + len(window), _folded(value, window)
        self._window, last = [], window[-RECENT:]
        if len(self._known) > _KNOWN:  # a program whose sizes never repeat
            self._known.clear()
            self._texts = {code: self._texts[code] for code in last}
        kept = [*windows[1 - _WINDOWS :], (number, value)]
        self._state = (number, value, self._window, last, kept)

    def snapshot(self) -> Snapshot:
        """Return number, fingerprint and last calls as they are now."""
        start, value, window, last, windows = self._state
        window = window[:]
        recent = [*last, *window][-RECENT:]
        number = start + len(window)
        first = number - len(recent) + 1
        shown = [(first + at, self._texts.get(code, "?")) for at, code in enumerate(recent)]
        return Snapshot(number, _folded(value, window), windows, shown, self.captured)


def _folded(value: int, codes: list[int]) -> int:
    """Return the fingerprint after more calls; hashes of whole numbers are equal everywhere."""
    return hash((value, *codes)) if codes else value
