"""A warning, once, for a function that is called in ever new ways; it says what changes."""

import torch

from commlib.graph.calls.cache_key import Arguments
from commlib.graph.calls.openable import PLAIN
from commlib.graph.replaying.entries import Entries
from commlib.graph.surroundings.surroundings import Surroundings
from commlib.log import log

_MANY = 8  # kinds of calls, where most are replayed
_SHAPES = "pad what varies to a few fixed sizes, or set max_graphs="
_NUMBERS = "use a tensor in place of a number"


class KindsWatch:
    """The last capture of a function in words, to be compared with a further kind of call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False
        self._last: tuple[list[str], dict[str, str]] | None = None

    def note(self, entries: Entries, call: Arguments, around: Surroundings) -> None:
        """Record a call that was captured, and what was around it; warn where none is replayed."""
        if len(entries) > _MANY and entries.replays < len(entries):
            self._warn(entries, call, around, "hardly any was replayed")
        self._last = call.described(), around.named()

    def note_full(self, entries: Entries, call: Arguments, around: Surroundings, most: int) -> None:
        """Warn of a call that gets no graph: there are ``most`` already."""
        message = f"calls of further kinds stay eager (max_graphs={most})"
        self._warn(entries, call, around, message)

    def _warn(self, entries: Entries, call: Arguments, around: Surroundings, what: str) -> None:
        """Warn once that there are many kinds: what happens, and how the call differs."""
        if self._warned:
            return
        self._warned = True
        changed, remedy = "", f"{_SHAPES}, or {_NUMBERS}"
        if self._last is not None:
            changed, remedy = _changed(*self._last, call, around)
            changed = f" ({changed})"
        log.warning("%s has %s graphs, and %s%s; %s",
                    self._name, len(entries), what, changed, remedy)  # fmt: skip


def _changed(
    last: list[str], settings: dict[str, str], call: Arguments, around: Surroundings
) -> tuple[str, str]:
    """Return the difference of a call from the one that was captured last, and a remedy."""
    described = call.described()
    if len(last) != len(described):
        text = f"the call has {len(described)} arguments, and had {len(last)}"
        return text, "pass the same number of them, or set max_graphs="
    for i, (was, now) in enumerate(zip(last, described, strict=True)):
        if was != now:
            return f"argument {i} is {now}, and was {was}", _remedy(call.leaves[i])
    named = around.named()
    changed = [name for name in settings | named if settings.get(name) != named.get(name)]
    if not changed:
        return "torch's modes have changed", "call it in the same modes, or set max_graphs="
    example = " (lr=torch.tensor(0.1))" if changed[0].startswith("lr ") else ""
    return f"{changed[0]} has changed", _NUMBERS + example


def _remedy(x: object) -> str:
    """Return what to do about an argument that changes from call to call."""
    if isinstance(x, torch.Tensor):
        return _SHAPES
    return _NUMBERS if type(x) in PLAIN else "pass the tensors in it alone (dict(batch))"
